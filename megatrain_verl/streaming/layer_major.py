"""One pass over the model in layer-major order: all micro-batches go through a unit before the next unit comes.

    forward    embedding, layers 0 .. n-1, head            each weight crosses to the device once
    backward   head, layers n-1 .. 0, embedding            layer weights once more, each gradient once to the host

A layer's visit in the backward pass recomputes it from its kept input and runs its backward, for every micro-batch;
the last layers may have kept all that their backward needs.
Work is appended to the streams in this order; what is named `_do_…` is such work and runs on the compute stream,
where it finds the tensors that the work before it left in the lists of the pass.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatrain_verl.streaming.activations import ActivationStore
from megatrain_verl.streaming.batch import TokenOutputs
from megatrain_verl.streaming.compiling import MaybeCompiled, leave_out_experts
from megatrain_verl.streaming.device_batch import DeviceBatch
from megatrain_verl.streaming.device_ring import DeviceRing
from megatrain_verl.streaming.dropout import dropout_seed, seeded
from megatrain_verl.streaming.expert_pass import ExpertPass
from megatrain_verl.streaming.gradients import Accumulator, GradientPath, gradient_views
from megatrain_verl.streaming.host_store import ParameterState
from megatrain_verl.streaming.model_plan import ModelPlan
from megatrain_verl.streaming.pass_plan import PassPlan
from megatrain_verl.streaming.router_loss import RouterBalance, RouterLoss
from megatrain_verl.streaming.streams import Streams
from megatrain_verl.streaming.token_head import TokenHead
from megatrain_verl.streaming.vision_pass import VisionPass

LossFunction = Callable[[int, TokenOutputs], Tensor]


class DeviceFunctions:
    """What runs for every layer and micro-batch: one of `layers`, and the addition of its gradients."""

    def __init__(self, compiled: bool, layers: Sequence[nn.Module], dtype: str) -> None:
        if compiled and dtype == "float32":
            leave_out_experts(layers)
        self.layer = MaybeCompiled(_call_layer, compiled)
        self.add = MaybeCompiled(_add_gradients, compiled)


class LayerMajorPass:
    """The state of one pass: what goes from unit to unit.

    Args:
        plan, state: the model and its host arenas.
        streams, ring, head: the queues and the device's buffers.
        functions: what runs for every layer and micro-batch.
        load: starts the transfer of a unit's weights, or of its part with the number given.
        prepare: for each micro-batch, work that makes its `DeviceBatch`.
        first: number of the first micro-batch in its step.
        dropout_key: names the dropout masks of this pass, see `dropout_seed`; None where nothing is drawn.
        device: "cuda" or "cpu".
        with_images: which micro-batches have images.
    """

    def __init__(
        self,
        plan: ModelPlan,
        state: ParameterState,
        streams: Streams,
        ring: DeviceRing,
        head: TokenHead,
        functions: DeviceFunctions,
        load: Callable[..., None],
        prepare: list[Callable[[], DeviceBatch]],
        first: int,
        dropout_key: tuple[int, int, int] | None,
        device: str,
        with_images: list[int],
    ) -> None:
        self._tied, self._streams, self._ring, self._token_head = plan.tied, streams, ring, head
        self._functions, self._load, self._prepare = functions, load, prepare
        self._dropout_key, self._device = dropout_key, device
        self._padding_idx, self._embedding_scale = plan.padding_idx, plan.embedding_scale
        units = {unit.plan.name: unit for unit in state.units}
        self._embedding, self._head = units[plan.embedding.name], units[plan.head.name]
        self._layers = [units[layer.name] for layer in plan.layers]
        self._count, self._first = len(prepare), first
        self._batches: list[DeviceBatch] = []
        self._hidden: list[Tensor | None] = []  # input of the unit that comes next, (1, T, H) per micro-batch
        self._grad: list[Tensor | None] = []  # gradient of the output of the unit that comes next, likewise
        # Of a kept layer: input; output and router logits with graph.
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self._router_loss, self._balance = plan.router_loss, None
        self.balances: list[RouterBalance] = []  # that of `forward_backward`, where the model has such a loss
        self._saved: dict[int, tuple[int, int]] = {}  # layer -> bytes that autograd saved, of so many tokens; on CUDA
        self.outputs: list[TokenOutputs] = []
        shared = (self._layers, streams, ring, load, functions.add, self._hidden, self._grad)
        self._experts = ExpertPass(*shared)
        self._vision: VisionPass | None = None
        if plan.vision is not None:
            shared = (state, streams, ring, load, self._batches, with_images, first, dropout_key, device)
            self._vision = VisionPass(plan.vision, *shared)

    def saved_bytes_per_token(self) -> float | None:
        """What autograd saves for a layer, of the layer with the most; None where it was not measured."""
        most = max((nbytes / tokens for nbytes, tokens in self._saved.values()), default=0.0)
        return most if most > 0 else None

    # ----------------------------------------------------------------------------------------------- the order

    def score(self, *, entropy: bool, sum_pi_squared: bool, argmax: bool = False) -> None:
        """Append the forward pass; `outputs` fills."""
        self._forward()
        self._ring.use(self._head.plan)
        self._for_each_micro_batch(self._do_score, entropy, sum_pi_squared, False, argmax)
        self._ring.done(self._head.plan)

    def forward_backward(
        self,
        loss_fn: LossFunction,
        gradients: GradientPath,
        inputs: ActivationStore,
        plan: PassPlan,
        interval: int,
        *,
        share: float,
        entropy: bool,
        sum_pi_squared: bool,
    ) -> None:
        """Append the forward and backward pass; `outputs` and `balances` fill.

        The last `plan.kept_layers` layers keep what their backward needs; of the others every `interval`-th keeps its
        input. `share` of the tokens of its call are in this pass.
        """
        if self._router_loss is not None:
            self._run(self._do_start_balance, self._router_loss, share)
        kept_from = len(self._layers) - plan.kept_layers
        visits = backward_visits(len(self._layers), interval, kept_from)
        self._forward(inputs, interval, kept_from)
        first = self._layers[visits[0][0]]
        inputs.prefetch(visits[0][0], self._count)
        if self._ring.disjoint(first.plan, self._head.plan):
            self._load(first)

        self._ring.use(self._head.plan)
        edge = gradients.begin(self._head)
        # What would be kept is of no use for a loss with the entropy.
        scores = (entropy, sum_pi_squared, plan.keep_logit_gradients and not entropy)
        self._for_each_micro_batch(self._do_head_backward, loss_fn, scores, edge)
        self._ring.done(self._head.plan)
        if not self._tied:
            gradients.finish(self._head, edge)

        templates = self._visit([layer for layer, _ in visits], lambda layer: inputs.prefetch(layer, self._count))
        for (_, is_backward), (layer, template) in zip(visits, templates, strict=True):
            self._experts.backward(layer, template, self._call, gradients, inputs, self._count)
            accumulator = gradients.begin(self._layers[layer]) if is_backward else None
            for m in range(self._count):
                if layer >= kept_from:
                    self._run(self._do_layer_backward, m, layer, template, accumulator)
                    continue
                hidden = inputs.fetch(layer, m)
                if is_backward:
                    self._run(self._do_recompute, m, layer, template, hidden)
                    self._run(self._do_layer_backward, m, layer, template, accumulator)
                else:
                    inputs.keep(layer + 1, m, partial(self._recomputed, m, layer, template, hidden))
                inputs.done(layer, m, last=is_backward)
            if is_backward:
                gradients.finish(self._layers[layer], accumulator)

        if not self._tied:  # a tied matrix adds the embedding's part to the head's
            edge = gradients.begin(self._embedding)
        self._for_each_micro_batch(self._do_embedding_backward, edge)
        gradients.finish(self._embedding, edge)
        if self._vision is not None:
            self._vision.backward(gradients)

    def _forward(self, inputs: ActivationStore | None = None, interval: int = 1, kept_from: int = 0) -> None:
        """With `inputs` the passes of training: inputs are kept below layer `kept_from`, graphs from there on."""
        if self._vision is None:
            self._load(self._embedding)
        for prepare in self._prepare:
            self._run(self._do_prepare, prepare)
        if self._vision is not None:  # the encoder comes first, in the embedding's slot
            self._vision.forward()
            self._load(self._embedding)
        self._ring.use(self._embedding.plan)
        self._for_each_micro_batch(self._do_embed)
        if not self._tied:  # a tied matrix stays in its slot until the head has used it
            self._ring.done(self._embedding.plan)

        last = len(self._layers) - 1
        for layer, template in self._visit(list(range(last + 1))):
            if layer == last and not self._tied and self._ring.disjoint(self._layers[last].plan, self._head.plan):
                self._load(self._head)
            for m in range(self._count):
                if inputs is not None and layer >= kept_from:
                    self._run(self._do_kept_layer, m, layer, template)
                    continue
                if inputs is not None and layer % interval == 0:
                    inputs.keep(layer, m, partial(self._hidden.__getitem__, m))
                self._run(self._do_layer, m, layer, template)
            self._experts.forward(layer, self._count)
        if not self._tied:
            self._load(self._head)

    def _visit(
        self, layers: list[int], prefetch: Callable[[int], None] = lambda layer: None
    ) -> Iterator[tuple[int, nn.Module]]:
        """Walk `layers`; while the caller computes with one, the next is on its way to the other slot.

        `prefetch` a layer's own inputs comes before that transfer, which has the whole visit to finish.
        """
        self._load(self._layers[layers[0]])
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            prefetch(layer)
            unit = self._layers[layer].plan
            # The first layer of another segment may belong into the very slot that is in use.
            early = following is not None and self._ring.disjoint(unit, self._layers[following].plan)
            if early:
                self._load(self._layers[following])
            self._ring.use(unit)
            yield layer, self._ring.layer(unit)
            self._ring.done(unit)
            if following is not None and not early:
                self._load(self._layers[following])

    def _for_each_micro_batch(self, work: Callable[..., None], *args: object) -> None:
        for m in range(self._count):
            self._run(work, m, *args)

    def _run(self, work: Callable[..., None], *args: object) -> None:
        self._streams.compute.run(partial(work, *args))

    # ------------------------------------------------------------------------------ work on the compute stream

    def _do_prepare(self, prepare: Callable[[], DeviceBatch]) -> None:
        self._batches.append(prepare())

    def _do_start_balance(self, settings: RouterLoss, share: float) -> None:
        self._balance = RouterBalance(settings, share, self._device)
        self.balances.append(self._balance)

    @torch.no_grad()
    def _do_embed(self, m: int) -> None:
        rows = self._scaled(F.embedding(self._batches[m].input_ids, self._ring.embedding_weight))
        self._hidden.append((rows if self._vision is None else self._vision.do_insert(m, rows))[None])

    @torch.no_grad()
    def _do_layer(self, m: int, layer: int, template: nn.Module) -> None:
        self._hidden[m] = self._call(m, layer, template, self._hidden[m])
        self._experts.do_note(m, layer, template)
        if self._balance is not None:
            self._balance.add(self._balance.logits(template))

    @torch.no_grad()
    def _recomputed(self, m: int, layer: int, template: nn.Module, hidden: Callable[[], Tensor]) -> Tensor:
        return self._call(m, layer, template, hidden())

    def _do_kept_layer(self, m: int, layer: int, template: nn.Module) -> None:
        self._call_with_graph(m, layer, template, self._hidden[m])
        _, output, logits = self._graphs[layer, m]
        self._hidden[m] = output.detach()
        if self._balance is not None:
            self._balance.add(logits)

    def _do_recompute(self, m: int, layer: int, template: nn.Module, hidden: Callable[[], Tensor]) -> None:
        self._call_with_graph(m, layer, template, hidden())

    def _call_with_graph(self, m: int, layer: int, template: nn.Module, hidden: Tensor) -> None:
        hidden = hidden.detach().requires_grad_()
        before = torch.cuda.memory_allocated() if self._device == "cuda" else None
        with torch.enable_grad():
            output = self._call(m, layer, template, hidden)
        logits = None if self._balance is None else self._balance.logits(template)
        self._graphs[layer, m] = hidden, output, logits
        if before is not None:  # known to the host's allocator: nothing waits for the device
            nbytes, tokens = self._saved.get(layer, (0, 0))
            self._saved[layer] = nbytes + torch.cuda.memory_allocated() - before, tokens + hidden.shape[1]

    def _call(self, m: int, layer: int, template: nn.Module, hidden: Tensor) -> Tensor:
        seed = None if self._dropout_key is None else dropout_seed(self._dropout_key, self._first + m, layer)
        for buffer in self._layers[layer].plan.buffers:  # a template serves many layers
            path, _, name = buffer.local.rpartition(".")
            value = self._layers[layer].buffers[buffer.name].to(self._device, non_blocking=True)
            template.get_submodule(path)._buffers[name] = value
        with seeded(seed, self._device):
            output = self._functions.layer(template, hidden, self._batches[m].layer_arguments[layer])
        return output if self._vision is None else self._vision.do_add(m, layer, output)

    def _do_score(
        self, m: int, entropy: bool, sum_pi_squared: bool, keep: bool = False, argmax: bool = False
    ) -> Tensor | None:
        scores = {"entropy": entropy, "sum_pi_squared": sum_pi_squared, "keep": keep, "argmax": argmax}
        outputs, kept = self._token_head.score(self._hidden[m][0], self._batches[m].tokens, **scores)
        self.outputs.append(outputs)
        return kept

    def _do_head_backward(
        self, m: int, loss_fn: LossFunction, scores: tuple[bool, bool, bool], accumulator: Accumulator | None
    ) -> None:
        kept = self._do_score(m, *scores)
        grad_log_probs, grad_entropy = loss_gradient(partial(loss_fn, self._first + m), self.outputs[m])
        totals = gradient_views(self._head.plan, accumulator)
        grad = self._token_head.backward(
            self._hidden[m][0],
            self._batches[m].tokens,
            grad_log_probs,
            grad_entropy,
            totals.get("norm.weight"),
            totals.get("embed_tokens.weight" if self._tied else "lm_head.weight"),
            kept,
        )
        self._grad.append(grad[None])
        self._hidden[m] = None

    def _do_layer_backward(self, m: int, layer: int, template: nn.Module, accumulator: Accumulator | None) -> None:
        totals = gradient_views(self._layers[layer].plan.pieces[0], accumulator)
        parameters = [template.get_parameter(local) for local in totals]
        hidden, output, logits = self._graphs.pop((layer, m))
        if self._vision is not None:
            self._vision.do_take_output_gradient(m, layer, self._grad[m])
        inner, inner_grads = self._experts.do_gradients(m, layer, template)
        outputs, seeds = [output, *inner], [self._grad[m], *inner_grads]
        if logits is not None:
            with torch.enable_grad():
                outputs.append(self._balance.part(logits))
            seeds.append(torch.ones_like(outputs[-1]))
        self._grad[m], *grads = torch.autograd.grad(outputs, [hidden, *parameters], seeds, allow_unused=True)
        used = [(total, grad) for total, grad in zip(totals.values(), grads, strict=True) if grad is not None]
        if used:
            self._functions.add(*zip(*used, strict=True))

    @torch.no_grad()
    def _do_embedding_backward(self, m: int, accumulator: Accumulator | None) -> None:
        total = gradient_views(self._embedding.plan, accumulator).get("embed_tokens.weight")
        ids, grad = self._batches[m].input_ids, self._grad[m][0]
        self._grad[m] = None
        if self._vision is not None:
            grad = self._vision.do_take_embedding_gradient(m, grad)
        if total is None:  # frozen
            return
        grad = self._scaled(grad).float()
        if self._padding_idx is not None:  # as torch's embedding; a tied matrix keeps the head's part in that row
            grad = grad.masked_fill((ids == self._padding_idx)[:, None], 0.0)
        if self._device == "cuda":  # sorts first: the same bits in every run, where index_add_ adds in any order
            total.index_put_((ids,), grad, accumulate=True)
        else:
            total.index_add_(0, ids, grad)

    def _scaled(self, rows: Tensor) -> Tensor:
        if self._embedding_scale == 1:
            return rows
        # Rounded to the type of the rows, as in the families that scale.
        return rows * torch.tensor(self._embedding_scale, dtype=rows.dtype).item()


def _call_layer(template: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    return template(hidden, **arguments)


def _add_gradients(totals: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for total, grad in zip(totals, grads, strict=True):
        total.add_(grad)


def backward_visits(num_layers: int, interval: int, kept_from: int) -> list[tuple[int, bool]]:
    """(layer, is_backward) in the order of the backward pass, when every `interval`-th layer input was kept.

    From layer `kept_from` on nothing is computed again. Below, segments come last to first. Each is walked from its
    kept input to its last layer but one, to get the other inputs, and then run backward. With interval 1 there is
    nothing to walk.
    """
    visits = [(layer, True) for layer in reversed(range(kept_from, num_layers))]
    for start in reversed(range(0, kept_from, interval)):
        end = min(start + interval, kept_from)
        visits += [(layer, False) for layer in range(start, end - 1)]
        visits += [(layer, True) for layer in reversed(range(start, end))]
    return visits


def loss_gradient(loss_fn: Callable[[TokenOutputs], Tensor], scores: TokenOutputs) -> tuple[Tensor, Tensor | None]:
    """Gradients (T,) of the loss for the log-probs and the entropy; None where the loss does not use the entropy."""
    log_probs = scores.log_probs.detach().requires_grad_()
    entropy = None if scores.entropy is None else scores.entropy.detach().requires_grad_()
    with torch.enable_grad():
        loss = loss_fn(TokenOutputs(log_probs, entropy, scores.sum_pi_squared))
    leaves = [leaf for leaf in (log_probs, entropy) if leaf is not None]
    if not loss.requires_grad:  # every label masked, say
        return torch.zeros_like(log_probs), None
    grads = [*torch.autograd.grad(loss, leaves, allow_unused=True), None]
    return torch.zeros_like(log_probs) if grads[0] is None else grads[0], grads[1]

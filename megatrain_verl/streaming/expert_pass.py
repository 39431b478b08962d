"""Layers whose experts are streamed in parts: what `layer_major.py` does with them besides running their dense part.

    forward    dense part for every micro-batch, noting what the experts get; then part by part, for every micro-batch,
               the tokens that chose its experts go through them, and their outputs are added to the layer's
    backward   the dense part again, for what the experts get; part by part the experts, forward and backward; last the
               dense part, forward and backward, with the gradients of what the experts got

So each weight crosses once in either pass, as in whole layers, and the attention of a layer runs once more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatrain_verl.streaming.activations import ActivationStore
from megatrain_verl.streaming.device_ring import DeviceRing
from megatrain_verl.streaming.expert_parts import PartPlan
from megatrain_verl.streaming.gradients import Accumulator, GradientPath, gradient_views
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.streams import Streams

AHEAD = 2  # parts on the device or on their way: one for each expert slot


@dataclass
class Routed:
    """What the experts of a layer get of one micro-batch of N tokens, K choices each.

    `hidden` (N, H), `index` and `weights` (N, K); `places`: by number of a part, which of the N x K choices are its
    experts'; `total` (N, H) float32: sum of the outputs, or of the gradients of `hidden`; `grad_weights` (N, K).
    """

    hidden: Tensor
    index: Tensor
    weights: Tensor
    places: list[Tensor]
    total: Tensor
    grad_weights: Tensor

    def rows(self, number: int, first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens (n,), hidden (n, H), experts and weights (n, 1) of part `number`, whose first expert is `first`."""
        places = self.places[number]
        tokens = places // self.index.shape[1]
        index, weights = self.index.flatten()[places], self.weights.flatten()[places]
        return tokens, self.hidden[tokens], (index - first)[:, None], weights[:, None]


class ExpertPass:
    """The experts' side of one pass over the model.

    Args:
        layers: all decoder layers; whole ones are left alone.
        streams, ring, load: as in `LayerMajorPass`; `load` takes the number of a part.
        add: adds gradients to their sums.
        hidden, grad: the pass's own lists of inputs and output gradients, (1, T, H) per micro-batch.
    """

    def __init__(
        self,
        layers: list[UnitState],
        streams: Streams,
        ring: DeviceRing,
        load: Callable[[UnitState, int], None],
        add: Callable[[list[Tensor], list[Tensor]], None],
        hidden: list[Tensor | None],
        grad: list[Tensor | None],
    ) -> None:
        self._layers, self._compute, self._ring, self._load = layers, streams.compute, ring, load
        self._add, self._hidden, self._grad = add, hidden, grad
        self._forward_order = [(unit, n) for unit in layers for n in range(1, len(unit.plan.parts))]
        self._order: list[tuple[UnitState, int]] = []  # of this direction; parts that are not loaded yet
        self._routed: dict[int, Routed] = {}  # by micro-batch, of the layer at hand

    def forward(self, layer: int, count: int) -> None:
        """After the dense part of `layer` ran for each of `count` micro-batches: append the work of its experts."""
        unit = self._layers[layer]
        if not unit.plan.parts:
            return
        if unit is self._forward_order[0][0]:
            self._start(self._forward_order)
        for number, part, experts in self._visit(unit, range(1, len(unit.plan.parts))):
            for m in range(count):
                self._compute.run(partial(self._do_forward, m, number, part, experts))
        for m in range(count):
            self._compute.run(partial(self._do_add_output, m))

    def backward(
        self,
        layer: int,
        template: nn.Module,
        call: Callable[[int, int, nn.Module, Tensor], Tensor],
        gradients: GradientPath,
        inputs: ActivationStore,
        count: int,
    ) -> None:
        """Before the backward pass of the dense part of `layer`: append that of its experts.

        `call` runs the dense part, given micro-batch, layer, template and input; to keep it would be a cycle that holds
        what the pass has on the device.
        """
        unit = self._layers[layer]
        if not unit.plan.parts:
            return
        if unit is self._forward_order[-1][0]:
            self._start(self._forward_order[::-1])
        for m in range(count):
            self._compute.run(partial(self._do_dense_again, m, layer, template, call, inputs.fetch(layer, m)))
            inputs.done(layer, m, last=False)
        for number, part, experts in self._visit(unit, range(len(unit.plan.parts) - 1, 0, -1)):
            accumulator = gradients.begin(unit, number)
            for m in range(count):
                self._compute.run(partial(self._do_backward, m, number, part, experts, accumulator))
            gradients.finish(unit, accumulator, number)

    def _start(self, order: list[tuple[UnitState, int]]) -> None:
        self._order = list(order)
        self._load_next(AHEAD)

    def _load_next(self, number: int) -> None:
        for unit, part in self._order[:number]:
            self._load(unit, part)
        del self._order[:number]

    def _visit(self, unit: UnitState, numbers: range) -> Iterator[tuple[int, PartPlan, nn.Module]]:
        """Walk parts of `unit`; while the caller computes with one, the next is on its way, of the next layer too."""
        for number in numbers:
            part = unit.plan.parts[number]
            self._ring.use(part)
            yield number, part, self._ring.layer(part)
            self._ring.done(part)
            self._load_next(1)

    # ------------------------------------------------------------------------------ work on the compute stream

    def do_note(self, m: int, layer: int, template: nn.Module) -> None:
        """The dense part of `layer` has run for a micro-batch: keep what its experts get."""
        parts = self._layers[layer].plan.parts
        if not parts:
            return
        hidden, index, weights = (each.detach() for each in parts[0].recorder(template).take())
        places = places_by_part(index, [part.first for part in parts[1:]])
        total = torch.zeros_like(hidden, dtype=torch.float32)
        # One for each part; the dense one has no experts.
        self._routed[m] = Routed(hidden, index, weights, [places[0][:0], *places], total, torch.zeros_like(weights))

    @torch.no_grad()
    def _do_forward(self, m: int, number: int, part: PartPlan, experts: nn.Module) -> None:
        routed = self._routed[m]
        if len(routed.places[number]):
            tokens, *inputs = routed.rows(number, part.first)
            _add_rows(routed.total, tokens, experts(*inputs))

    @torch.no_grad()
    def _do_add_output(self, m: int) -> None:
        hidden = self._hidden[m]
        self._hidden[m] = hidden + self._routed.pop(m).total.to(hidden.dtype).view_as(hidden)

    @torch.no_grad()
    def _do_dense_again(
        self,
        m: int,
        layer: int,
        template: nn.Module,
        call: Callable[[int, int, nn.Module, Tensor], Tensor],
        hidden: Callable[[], Tensor],
    ) -> None:
        call(m, layer, template, hidden())
        self.do_note(m, layer, template)

    def _do_backward(
        self, m: int, number: int, part: PartPlan, experts: nn.Module, accumulator: Accumulator | None
    ) -> None:
        routed = self._routed[m]
        if not len(routed.places[number]):
            return
        tokens, hidden, index, weights = routed.rows(number, part.first)
        hidden.requires_grad_()
        weights.requires_grad_()
        with torch.enable_grad():
            output = experts(hidden, index, weights)
        totals = {} if accumulator is None else gradient_views(part, accumulator)
        parameters = [experts.get_parameter(local) for local in totals]
        grad = self._grad[m].flatten(0, 1)[tokens]
        grad_hidden, grad_weights, *grads = torch.autograd.grad(output, [hidden, weights, *parameters], grad)
        _add_rows(routed.total, tokens, grad_hidden)
        routed.grad_weights.view(-1)[routed.places[number]] = grad_weights.flatten()
        if grads:
            self._add(list(totals.values()), grads)

    def do_gradients(self, m: int, layer: int, template: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """What the experts of `layer` got in the dense part's last run, with graph, and the gradients of that."""
        parts = self._layers[layer].plan.parts
        if not parts:
            return [], []
        hidden, _, weights = parts[0].recorder(template).take()
        routed = self._routed.pop(m)
        return [hidden, weights], [routed.total.to(hidden.dtype), routed.grad_weights]


def places_by_part(index: Tensor, firsts: list[int]) -> list[Tensor]:
    """Places in the flat `index` (N, K) of the choices that belong to each part, by expert, given its first expert.

    On CUDA the host waits here for the choices.
    """
    experts, order = index.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.tensor(firsts[1:], dtype=experts.dtype, device=experts.device))
    return list(order.tensor_split(ends.tolist()))


def _add_rows(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add `rows` (n, H) to those of `total` (N, H) that `tokens` (n,) name, each any number of times."""
    if total.device.type == "cuda":  # sorts first: the same bits in every run, where index_add_ adds in any order
        total.index_put_((tokens,), rows.to(total.dtype), accumulate=True)
    else:
        total.index_add_(0, tokens, rows.to(total.dtype))

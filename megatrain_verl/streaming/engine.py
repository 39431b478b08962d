"""The streaming engine: one training step, layer by layer over all of its micro-batches.

    engine.zero_grad()
    engine.forward_backward(micro_batches, loss_fn)     forward: each weight crosses to the device once;
                                                        backward: once more, and each gradient crosses back once
    norm = engine.optimizer_step()                      starts AdamW on the host; units are updated in forward order
    engine.forward(micro_batches)                       waits for each unit as it comes to it

The order inside the two passes is in `layer_major.py`.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatrain_verl.config import AdamWConfig, LoraSettings, StreamingConfig
from megatrain_verl.resources import HostPlan, check_host_memory, check_spill
from megatrain_verl.streaming import adapters, checkpoint, linear_attention, memory_advice, weight_files
from megatrain_verl.streaming.activations import ActivationStore, SpillArea
from megatrain_verl.streaming.attention import check_available, check_layers
from megatrain_verl.streaming.batch import MicroBatch, TokenOutputs, check_micro_batches
from megatrain_verl.streaming.device_adamw import make_share
from megatrain_verl.streaming.device_batch import to_device
from megatrain_verl.streaming.device_ring import DeviceRing, TransferCounters, return_memory
from megatrain_verl.streaming.gradients import GradientPath
from megatrain_verl.streaming.group.group import ALONE, Group
from megatrain_verl.streaming.group.pass_agreement import PassAgreement
from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_store import DTYPES, ParameterState, UnitState
from megatrain_verl.streaming.image_memory import ImageSizes
from megatrain_verl.streaming.image_positions import check_images
from megatrain_verl.streaming.layer_arguments import DecoderSkeleton
from megatrain_verl.streaming.layer_major import DeviceFunctions, LayerMajorPass, LossFunction
from megatrain_verl.streaming.model_plan import plan_model
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner
from megatrain_verl.streaming.streams import DeviceStreams, Streams, do_after_failure
from megatrain_verl.streaming.token_head import TokenHead
from megatrain_verl.streaming.unit_updates import UnitUpdates


class StreamingEngine:
    """Training of a model whose weights and Adam state live in host memory: all parameters, some, or LoRA adapters.

    Args:
        model_config: Hugging Face config of a supported decoder-only model.
        config: how the engine runs.
        optimizer: AdamW settings; None makes a forward-only engine, which keeps nothing but the weights.
        device: "cuda" or "cpu".
        keep_reference: keep the weights as first loaded for `reference_weights`.
        streams: the queues of work; the device's own by default.
        group: the ranks that share the arenas, of which this process is one; by default it is alone. `close` leaves it.
        lora: train adapters only; the reference is the model without them.

    Raises:
        ValueError: an unsupported model or option, or too little host memory; before anything is allocated.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        config: StreamingConfig,
        optimizer: AdamWConfig | None,
        *,
        device: str,
        keep_reference: bool = False,
        streams: Streams | None = None,
        group: Group = ALONE,
        lora: LoraSettings | None = None,
    ) -> None:
        check_available(config.attn_implementation, config.dtype, device)
        self.config, self.model_config, self.device, self.group = config, model_config, device, group
        self.plan = plan_model(model_config, config.freeze, lora, config.expert_parts)
        check_layers(config.attn_implementation, self.plan.structures)
        trainable, copies = optimizer is not None, keep_reference and lora is None
        self.host_plan = HostPlan.of(self.plan, config, trainable=trainable, reference=copies, ranks=group.size)
        check_host_memory(self.host_plan, config)
        if trainable:
            linear_attention.check_kernels(self.plan.structures)
            adamw = HostAdamW(config.optimizer_backend, config.cpu_threads or group.cores())
        self.state = ParameterState.allocate(
            self.plan, config, trainable=trainable, reference=copies, register=device == "cuda", group=group
        )
        self.streams = streams or DeviceStreams(device, group.wait_for)
        self.counters = TransferCounters()
        self._ring: DeviceRing | None = None
        # Embedding and head may lie over the layers where they are used in turn; a tied matrix is used throughout.
        self._compact = config.most_resident_layers == 0 and not self.plan.tied
        # Compiled dropout would draw other masks than the plain layer does.
        self._compiled = config.compile_layers and not self.plan.has_dropout()
        self._functions = DeviceFunctions(self._compiled, self.plan.structures, config.dtype)
        images = None if self.plan.vision is None else ImageSizes.of(self.plan.vision)
        self.planner = PassPlanner(self.plan, config, device, images)
        self._adamw_config, self._keeps_reference, self._reads_reference = optimizer, keep_reference, False
        self.step_count, self._calls = 0, group.rank  # `_calls` since zero_grad, of all ranks: for other dropout masks
        self.router_loss: Tensor | float = 0.0  # of the last forward_backward, () float32; see `router_loss.py`
        if trainable:
            self.adamw_backend = adamw.backend  # the host kernel in use: native, deepspeed or torch
            share = make_share(config.device_adamw, adamw, self.streams, device)
            self._updates = UnitUpdates(optimizer, adamw, share, self.streams, group)
            self._gradients = GradientPath(self.plan, self.state, self.streams, self.counters, config, group, device)
            self._spill_area = SpillArea(partial(check_spill, config, self.host_plan), register=device == "cuda")
            self.agreement = PassAgreement(group, config, self.streams, self.state, device)
        self.closed = False

    # ------------------------------------------------------------------------------------------------- a step

    def forward(
        self,
        micro_batches: list[MicroBatch],
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        argmax: bool = False,
    ) -> list[TokenOutputs]:
        """Scores of `micro_batches` in evaluation mode, without gradient; tensors on the engine's device."""
        with self.group.told():
            self._check(micro_batches)
        with self._released_on_error(micro_batches):
            run = self._start(micro_batches, training=False)
            run.score(entropy=entropy, sum_pi_squared=sum_pi_squared, argmax=argmax)
            self.streams.host_wait(self.streams.compute.record(), "scores computed")
        return run.outputs

    def forward_backward(
        self,
        micro_batches: list[MicroBatch],
        loss_fn: LossFunction,
        *,
        entropy: bool = False,
        sum_pi_squared: bool = False,
        next_lr: float | None = None,
    ) -> list[TokenOutputs]:
        """Add the gradient of `router_loss` and of the sum of `loss_fn(i, outputs_i)`; returns the outputs, detached.

        `loss_fn` gets the number of a micro-batch and its outputs, whose `log_probs` and `entropy` require gradient,
        and returns a scalar. It is called once per micro-batch, in order. A loss that requires no gradient adds none.

        `next_lr` says that `optimizer_step` with this learning rate will follow at once: with `speculative_adamw_gb`
        AdamW starts behind the backward pass. If something else follows, its results are dropped.
        """
        if self._adamw_config is None:
            raise ValueError("this engine is forward-only: it was made without an optimizer")
        with self.group.told():
            self._check(micro_batches)
            self._gradients.check_addable()
            self._updates.guess(next_lr, self.step_count + 1)
            plan = self._plan_pass(micro_batches)
        outputs, balances = [], []  # of each wave; what else a wave has on the device goes with it
        with self._released_on_error(micro_batches, plan):
            part = self._gradients.begin_call(1 if plan.resident_gradients else len(plan.waves), micro_batches, next_lr)
            for number, wave in enumerate(plan.split(micro_batches), 1):
                first, share = sum(plan.waves[: number - 1]), part * plan.share(number, micro_batches)
                run = self._start(wave, first=first, training=True, layer_slots=plan.layer_slots)
                self._gradients.acquire_device(self.device, plan.resident_gradients, self._compact)
                last = number == len(plan.waves)
                self._gradients.begin_wave(self._updates, first=number == 1, last=last)
                reserve, interval = self._spill_area.reserve, self.config.checkpoint_interval
                inputs = ActivationStore.of_pass(self.streams, self.plan, self.config, plan, wave, self.device, reserve)
                how = {"entropy": entropy, "sum_pi_squared": sum_pi_squared, "share": share}
                run.forward_backward(loss_fn, self._gradients, inputs, plan, interval, **how)
                self._gradients.end_wave()
                outputs.append(run.outputs)
                balances.append(run.balances)
                if last or inputs.spilled_bytes:  # the next wave spills to the same host memory
                    self.streams.host_wait(self.streams.compute.record(), "outputs computed")
            self._gradients.end_call()
            self.router_loss = sum(balance.loss() for wave in balances for balance in wave)
            self.planner.saved_bytes_per_token = run.saved_bytes_per_token()
            self._calls += self.group.size
        return [output for wave in outputs for output in wave]

    def _start(
        self, micro_batches: list[MicroBatch], *, first: int = 0, training: bool, layer_slots: int = 2
    ) -> LayerMajorPass:
        self.acquire_device(layer_slots)
        self._ring.train(training, adapters=not self._reads_reference)
        self._ring.reads = self.agreement.reads if training else None
        parts = (self._skeleton, self.plan.masks, self.plan.vision)
        settings = (*parts, DTYPES[self.config.dtype], self.config.attn_implementation)
        return LayerMajorPass(
            self.plan,
            self.state,
            self.streams,
            self._ring,
            self._token_head,
            self._functions,
            self._load,
            [partial(to_device, batch, self.device, *settings) for batch in micro_batches],
            first,
            (self.config.seed, self.step_count, self._calls) if training and self.plan.has_dropout() else None,
            self.device,
            [m for m, batch in enumerate(micro_batches) if batch.images is not None],
        )

    def _plan_pass(self, micro_batches: list[MicroBatch]) -> PassPlan:
        plan, fits = self.agreement.plan(self.planner, micro_batches, self._ring, self._device_bytes())
        if not fits:
            self.release_device()
            plan, _ = self.agreement.plan(self.planner, micro_batches, None, 0)  # by what is free, whoever has slots
        return plan

    def _load(self, unit: UnitState, part: int = 0) -> None:
        """Start the transfer of a unit's weights, which waits for that unit's AdamW, and for no other's."""
        self._wait_updated(unit, "transfer")
        self.state.load(unit, part, self._ring, self.streams, reference=self._reads_reference)

    def _check(self, micro_batches: list[MicroBatch]) -> None:
        limit = self.config.max_seq_len or self.plan.config.get_text_config().max_position_embeddings
        check_micro_batches(micro_batches, limit, self.plan.vocab_size)
        check_images(micro_batches, self.plan.vision)

    def _weights_changed(self) -> None:
        if self._adamw_config is not None:
            self._updates.guess(None, 0)
        if self._ring is not None:
            self._ring.forget()

    def zero_grad(self) -> None:
        """Forget the gradients. A pending AdamW still reads them."""
        self._gradients.zero()
        self._updates.guess(None, 0)
        self._calls = self.group.rank

    def optimizer_step(self, lr: float | None = None) -> float:
        """Start AdamW, in forward order, on units not updated ahead; return the global gradient norm before clipping.

        Learning rate (`lr`, or the config's), betas, decay, step number and clip factor are those of this call, however
        much later a unit is updated. If the norm is not finite, nothing changes and the step is not counted.

        Raises:
            ValueError: there are no gradients.
            RuntimeError: an earlier update failed; names the unit.
        """
        if self._adamw_config is None or not self._gradients.pending:
            raise ValueError("there are no gradients: call forward_backward of a trainable engine first")
        with self.group.told():
            self._gradients.wait_landed()
            norm = self._gradients.norm()
            if not math.isfinite(norm):
                return norm
            clip = math.inf if self._adamw_config.clip_grad is None else self._adamw_config.clip_grad
            grad_scale = min(1.0, clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            self.step_count += 1
            self._updates.start(self.state.parts, lr, grad_scale, self.step_count)
        self.state.updates_started()
        self._weights_changed()
        return norm

    def _wait_updated(self, unit: UnitState, purpose: str) -> None:
        if self._adamw_config is not None:
            self._updates.wait(unit, purpose)

    # ------------------------------------------------------------------------------------------------ weights

    def load_weights(self, source: str | Path | Iterable[tuple[str, Tensor]]) -> None:
        """Fill the master weights from a folder of safetensors or from (Hugging Face name, tensor) pairs.

        Raises:
            ValueError: a missing, unknown, repeated or differently shaped tensor; see `weight_files.load_into`.
        """
        for unit in self.state.units:
            self._wait_updated(unit, "new weights")
        self._weights_changed()
        with self.group.by_first("the weights") as mine:
            if mine:
                weight_files.load_into(self.state, self.plan, source)
                adapters.start(self.state.units, self.config.seed)
            else:
                weight_files.take_layout(self.plan, source)
        self.group.do_once("the reference", self.state.keep_loaded_reference)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, weight in the compute dtype) in forward order; views of the host arenas, tied once.

        Names and cuts (experts apart or merged) are those of the folder that was loaded last, else the ones that
        transformers saves. A view holds these weights until the next `optimizer_step`; with a LoRA adapter merged in,
        a weight is a copy. Waits for the AdamW of each unit as it comes to it, and for no other.
        """
        for unit in self.state.units:
            self._wait_updated(unit, "export")
            for name, tensor in adapters.merged_weights(unit, self.plan.lora):
                yield from self.plan.hub.export(name, tensor)

    def named_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """(name in peft's files, view of the host arena) of the LoRA adapters; see `named_weights`."""
        for unit in self.state.units:
            self._wait_updated(unit, "export")
            yield from adapters.adapter_weights(unit)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Inside, `forward` reads the reference policy's weights, by a pointer swap or from their file."""
        if not self._keeps_reference:
            raise ValueError("this engine keeps no reference: make it with keep_reference=True")
        self._reads_reference = True
        self._weights_changed()
        try:
            yield
        finally:
            self._reads_reference = False
            self._weights_changed()

    def save(self, folder: str | Path, meta: dict[str, object] | None = None) -> None:
        """Write masters, moments and step count to `folder`, unit by unit, bit for bit."""
        meta = {"step_count": self.step_count, **(meta or {})}
        wait = partial(self._wait_updated, purpose="saving")
        self.group.do_once("the checkpoint", checkpoint.save_state, folder, self.plan, self.state, meta, wait)

    def load(self, folder: str | Path) -> dict[str, object]:
        """Restore what `save` wrote and return its `meta`; the reference stays what it was before.

        Raises:
            ValueError: a checkpoint of another model or an incomplete one; before anything is overwritten.
        """
        if self._adamw_config is None:
            raise ValueError("this engine is forward-only: it has no training state to load")
        for unit in self.state.units:
            self._wait_updated(unit, "loading")
        self._weights_changed()
        self.group.do_once("the checkpoint", checkpoint.load_state, folder, self.plan, self.state)
        self.state.reference_is_kept()
        meta = checkpoint.read_meta(folder)
        self.step_count = int(meta["step_count"])
        self.zero_grad()
        return meta

    # ----------------------------------------------------------------------------------------- device and end

    def acquire_device(self, layer_slots: int = 2) -> None:
        """Allocate the weight slots on the device; `forward` and `forward_backward` do it when needed."""
        if self._ring is not None:
            return
        where, dtype = self.device, DTYPES[self.config.dtype]
        self._ring = DeviceRing(self.plan, self.streams, self.counters, where, dtype, layer_slots, self._compact)
        head, compiled = (self._ring.norm, self._ring.head_weight), self._compiled and self.device == "cuda"
        self._token_head = TokenHead(*head, self.config.head_chunk_tokens, compiled, self.plan.logit_softcap)
        self._skeleton = DecoderSkeleton(self.plan.decoder, self.device)
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()  # the buffers are zeroed before other streams touch them

    def _device_bytes(self) -> int:
        ring = 0 if self._ring is None else self._ring.nbytes
        return ring + self._gradients.device_bytes + self._updates.device_bytes

    def release_device(self, *, updates: bool = True) -> None:
        """Wait for the device and free everything on it. Gradients that are on the host stay.

        Without `updates` an AdamW in which the device takes part goes on, and keeps what it needs there.
        """
        if self._ring is None:
            self._free_device(updates=updates)  # of a failed pass: what its error still held when the rest was freed
            return
        # A pass ends when the compute stream has used all weights; gradients may still be on their way.
        self.streams.host_wait(self.streams.grad.record(), "gradients sent")
        self.streams.host_wait(self.streams.adder.record(), "gradients added")
        self._free_device(updates=updates)

    def close(self) -> None:
        """Wait for pending work and release all memory. The engine cannot be used afterwards, but closed again."""
        if self.closed:
            return
        self.closed = True
        with ExitStack() as rest:  # last to first, whatever one of them raises
            rest.callback(self.group.close)
            rest.callback(self.state.close)
            if self._adamw_config is not None:
                for part in (self._spill_area, self._updates, self._gradients, self.agreement):
                    rest.callback(part.close)
            rest.callback(self.streams.close)
            self.release_device()

    def _free_device(self, *, updates: bool = True) -> None:
        slots = [] if self._ring is None else self._ring.storages()
        self._ring = self._token_head = self._skeleton = None
        with ExitStack() as rest:  # last to first, whatever one of them raises
            rest.callback(return_memory, slots, self.device)
            if self._adamw_config is not None:
                if updates:
                    rest.callback(self._updates.release_device)
                self._gradients.release_device()

    @contextmanager
    def _released_on_error(self, micro_batches: list[MicroBatch], plan: PassPlan | None = None) -> Iterator[None]:
        """A pass that fails in the middle leaves half-used slots and half-added gradients: drop them all."""
        try:
            yield
        except BaseException as error:
            self.group.fail(error)
            zero_grad = [] if self._adamw_config is None else [self.zero_grad]
            explain = partial(memory_advice.explain, error, self.plan, self.config, micro_batches, plan, self.planner)
            drop = (self.streams.abandon, self.state.forget_read_ahead, *zero_grad, self._free_device)
            do_after_failure(*([explain] if isinstance(error, torch.OutOfMemoryError) else []), *drop)
            raise

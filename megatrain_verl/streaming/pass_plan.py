"""What a training step does with the device memory that streaming leaves free.

Streaming needs two layer slots and a few buffers. More memory buys, in the order of what it saves:

    kept layers          the last layers keep what autograd saved and are not computed again
    resident gradients   FP32 sums of all units stay on the device, so that the step may run in waves of micro-batches,
                         of which each is small enough for kept layers
    layer slots          weights that are still on the device need no second transfer

`PassPlanner` compares what fits by the step time that the rates of `RATES` predict.
"""

import math
from dataclasses import dataclass, replace

import torch

from megatrain_verl.config import StreamingConfig
from megatrain_verl.resources import GIB
from megatrain_verl.streaming.batch import MicroBatch, waves
from megatrain_verl.streaming.device_plan import Rates, Sizes, device_bytes
from megatrain_verl.streaming.host_store import DTYPES
from megatrain_verl.streaming.image_memory import ImageBytes, ImageSizes

RESERVE = 0.05  # share of the device that stays free: CUDA's own memory and the allocator's fragments
CPU_KEPT_LOGITS = 1 << 30  # bytes; where no budget is known


# What whole layers reach, forward and backward, on one H200 (docs/experiments.md). The rates only rank plans.
RATES = Rates(matmul=620e12)


@dataclass(frozen=True)
class PassPlan:
    """How one `forward_backward` runs.

    `waves`: micro-batches per wave; `layer_slots`: of the ring; `kept_layers`: last layers that are not recomputed;
    `resident_gradients`: sums stay on the device until the last wave; `keep_logit_gradients`: see `TokenHead.score`;
    `input_bytes`: of kept layer inputs that may stay on the device, the rest goes to the host.
    """

    waves: tuple[int, ...]
    layer_slots: int = 2
    kept_layers: int = 0
    resident_gradients: bool = False
    keep_logit_gradients: bool = False
    input_bytes: float = math.inf

    def split(self, micro_batches: list[MicroBatch]) -> list[list[MicroBatch]]:
        """The micro-batches of each wave."""
        rest = iter(micro_batches)
        return [[next(rest) for _ in range(count)] for count in self.waves]

    def share(self, number: int, micro_batches: list[MicroBatch]) -> float:
        """The part of the tokens that wave `number` (from 1) has."""
        tokens = wave_sums(self, [batch.num_tokens for batch in micro_batches])
        return tokens[number - 1] / sum(tokens)


class PassPlanner:
    """Chooses a `PassPlan` for each step.

    Args:
        sizes: of the model.
        config: `resident_layers`, `wave_tokens` and `device_activation_gb` limit the choice.
        device: on "cpu" everything is streamed: there memory for more buys nothing.
        images: of the model's images; None for a text model.
    """

    def __init__(self, sizes: Sizes, config: StreamingConfig, device: str, images: ImageSizes | None = None) -> None:
        self._sizes, self._config, self._device, self._images = sizes, config, device, images
        self._count = len(sizes.layer_sizes)
        # Bytes that autograd saves per layer and token, measured in the first backward pass; None keeps no layer.
        self.saved_bytes_per_token: float | None = None

    def plan(self, micro_batches: list[MicroBatch], own_bytes: int) -> PassPlan:
        """The fastest plan that fits; `own_bytes` of what is allocated on the device belong to ring and gradients.

        Raises:
            ValueError: a micro-batch is larger than `wave_tokens`.
        """
        tokens = [batch.num_tokens for batch in micro_batches]
        forced = tuple(len(wave) for wave in waves(micro_batches, self._config.wave_tokens))
        if self._device != "cuda":
            kept_logits = max(tokens) * self._sizes.vocab_size * DTYPES[self._config.dtype].itemsize
            plan = PassPlan(forced, keep_logit_gradients=self._may_keep and kept_logits <= CPU_KEPT_LOGITS)
        else:
            available = available_bytes(own_bytes, self._config.gpu_memory_utilization)
            images = self.image_bytes(micro_batches)
            splits = [forced] if self._config.wave_tokens or not self._may_keep else _even_splits(len(tokens))
            plans = [plan for split in splits for plan in self._fitting(split, tokens, images, available)]
            plan = min(plans, key=lambda plan: self.seconds(plan, tokens))
        if self._config.device_activation_gb is not None:
            plan = replace(plan, input_bytes=self._config.device_activation_gb * GIB)
        return plan

    def image_bytes(self, micro_batches: list[MicroBatch], *, training: bool = True) -> ImageBytes:
        """What the images of a pass take."""
        images = self._images if training or self._images is None else replace(self._images, trained=0)
        return ImageBytes.of(micro_batches, images, DTYPES[self._config.dtype].itemsize)

    @property
    def _may_keep(self) -> bool:
        return self._config.most_resident_layers != 0

    def lowered(self, plan: PassPlan, micro_batches: list[MicroBatch], layer_slots: int, kept_layers: int) -> PassPlan:
        """`plan` with fewer slots or kept layers. What is free then holds layer inputs, if it may."""
        fewer = replace(plan, layer_slots=layer_slots, kept_layers=kept_layers)
        if fewer == plan or self._config.device_activation_gb is not None:
            return fewer
        wave = max(wave_sums(plan, [batch.num_tokens for batch in micro_batches]))
        slot = max(self._sizes.layer_sizes) * DTYPES[self._config.dtype].itemsize
        free = (plan.layer_slots - layer_slots) * slot
        free += (plan.kept_layers - kept_layers) * (self.saved_bytes_per_token or 0.0) * wave
        return replace(fewer, input_bytes=plan.input_bytes + free)

    def _fitting(
        self, split: tuple[int, ...], tokens: list[int], images: ImageBytes, available: float
    ) -> list[PassPlan]:
        """Plans for one split into waves, each with as many kept layers and slots as there is memory for."""
        if len(split) > 1 and self._may_keep:
            plan = self._fill(PassPlan(split, resident_gradients=True), tokens, images, available)
            if plan.input_bytes >= self._input_bytes(plan, max(wave_sums(plan, tokens))):
                return [plan]
        if len(split) == 1 or self._config.wave_tokens:
            return [self._fill(PassPlan(split), tokens, images, available)]
        return []

    def _fill(self, plan: PassPlan, tokens: list[int], images: ImageBytes, available: float) -> PassPlan:
        wave, micro_batch = max(wave_sums(plan, tokens)), max(tokens)
        pictured = {"image_bytes": max(wave_sums(plan, images.held)), "encoder_bytes": images.encoder}
        settings = {"resident_gradients": plan.resident_gradients, **pictured}
        parts = device_bytes(self._sizes, self._config, micro_batch, wave, **settings)
        moving = parts["workspace"] + parts["hidden states"] + parts["recomputed inputs"]
        moving += parts.get("inputs of experts", 0)
        room = available - sum(parts.values()) - 0.25 * moving
        limit = self._config.most_resident_layers
        most = self._count if limit is None else min(limit, self._count)
        interval = self._config.checkpoint_interval
        inputs = wave * self._sizes.hidden_size * DTYPES[self._config.dtype].itemsize / interval
        logits = micro_batch * self._sizes.vocab_size * DTYPES[self._config.dtype].itemsize
        keep_logits = self._may_keep and room - self._count * inputs >= logits
        room -= logits if keep_logits else 0
        kept = 0
        if self.saved_bytes_per_token is not None and room > self._count * inputs:
            saved = self.saved_bytes_per_token * wave
            kept = min(most, int((room - self._count * inputs) / max(saved - inputs, 1.0)))
            kept -= -(self._count - kept) % interval if kept < self._count else 0
            kept = max(0, kept)
            room -= kept * saved
        inputs *= self._count - kept
        slot = max(self._sizes.layer_sizes) * DTYPES[self._config.dtype].itemsize
        extra = min(most, self._count - 2, int(max(0.0, room - inputs) / slot)) if self._count > 2 else 0
        return replace(
            plan,
            layer_slots=2 + extra,
            kept_layers=kept,
            keep_logit_gradients=keep_logits,
            input_bytes=max(0.0, room - extra * slot),
        )

    def seconds(self, plan: PassPlan, tokens: list[int], rates: Rates = RATES) -> float:
        """Predicted seconds of a step: arithmetic or transfers of each pass, and the AdamW that no forward hides."""
        layers, edges = sum(self._sizes.layer_sizes), sum(self._sizes.edge_sizes)
        active, head = self._sizes.active_layer_parameters, self._sizes.vocab_size * self._sizes.hidden_size
        recomputed = 1 - plan.kept_layers / self._count
        streamed = 1 - plan.layer_slots / self._count
        itemsize = DTYPES[self._config.dtype].itemsize
        total, first_forward = 0.0, 0.0
        for number, wave in enumerate(wave_sums(plan, tokens)):
            held = 1.0 if number == 0 else streamed
            forward = max(2 * active * wave / rates.matmul, itemsize * (held * layers + edges) / rates.transfer)
            arithmetic = (4 + 2 * recomputed) * active * wave + (6 if plan.keep_logit_gradients else 8) * head * wave
            spilled = max(0.0, self._input_bytes(plan, wave) - plan.input_bytes)
            backward = max(arithmetic / rates.matmul, (itemsize * streamed * layers + spilled) / rates.transfer)
            total += forward + backward
            first_forward = first_forward or forward
        adamw = (sum(self._sizes.trained_layer_sizes) + sum(self._sizes.trained_edge_sizes)) / rates.adamw
        return total + max(0.0, adamw - first_forward)

    def _input_bytes(self, plan: PassPlan, wave: int) -> float:
        row = self._sizes.hidden_size * DTYPES[self._config.dtype].itemsize
        return (self._count - plan.kept_layers) * wave * row / self._config.checkpoint_interval


def available_bytes(own_bytes: int, utilization: float) -> float:
    """Device memory that the engine may use: what is free or its own, less 5% of the device.

    Never more than this share of the device in all, whoever else in this process has a part of it.
    """
    free, total = torch.cuda.mem_get_info()
    allocated = torch.cuda.memory_allocated()
    unused = torch.cuda.memory_reserved() - allocated
    return min(free + unused + own_bytes - RESERVE * total, utilization * total - (allocated - own_bytes))


def _even_splits(count: int) -> list[tuple[int, ...]]:
    """`count` micro-batches in 1, 2, 4, ... waves of the same number, the last with what is left."""
    splits = []
    size = count
    while True:
        full, rest = divmod(count, size)
        splits.append((size,) * full + ((rest,) if rest else ()))
        if size == 1:
            return splits
        size = -(-size // 2)


def wave_sums(plan: PassPlan, values: list[int]) -> list[int]:
    """Of each wave, the sum of the `values` of its micro-batches."""
    rest = iter(values)
    return [sum(next(rest) for _ in range(count)) for count in plan.waves]

"""Device slots that hold one unit's weights at a time, and the template layers whose parameters are views into them.

Layer i always goes to layer slot i mod S. With two slots, one is computed with while the other is filled. The last S
layers of the forward pass are still there when the backward pass comes to them, and with one slot per layer nothing is
sent twice while the weights stay the same. One more slot holds the embedding at the start of the forward pass and the
head at its end (for tied models both at once); the encoder of images is in it before the embedding, and its projector
in a slot of its own. Nothing is unflattened or copied on the device.

Of a layer whose experts are streamed in parts, a layer slot holds the dense part. The parts with experts take turns in
two expert slots, in forward order.

`compact` slots save that last one: it lies over the layer slots, and embedding, layers and head use the memory in turn.
"""

import copy
import gc
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from megatrain_verl.streaming import unpacked_rows
from megatrain_verl.streaming.adapters import enable_adapters
from megatrain_verl.streaming.group.shared_reads import SharedReads
from megatrain_verl.streaming.model_plan import ModelPlan
from megatrain_verl.streaming.model_units import Range, UnitPlan
from megatrain_verl.streaming.streams import Event, Streams
from megatrain_verl.streaming.vision_plan import bind_vision


@dataclass
class TransferCounters:
    """Bytes of weights sent to the device and of gradients sent to the host since the engine was made."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0


@dataclass
class Slot:
    """A flat device buffer. `unit`: whose weights are in it or on their way, `ready`: they have arrived, `free`: the
    computation has used them, `overlapping`: slots that lie in the same memory.
    """

    name: str
    buffer: Tensor
    unit: str | None = None
    ready: Event | None = None
    free: Event | None = None
    overlapping: "list[Slot]" = field(default_factory=list)


class DeviceRing:
    """The slots of one engine. For each visit of a unit: `load` ahead of time, `use`, compute, `done`.

    `reads`: how this rank reads with others; None where it reads for itself.
    """

    def __init__(
        self,
        plan: ModelPlan,
        streams: Streams,
        counters: TransferCounters,
        device: str,
        dtype: torch.dtype,
        num_layer_slots: int,
        compact: bool = False,
    ) -> None:
        self._streams, self._counters, self._has_adapters = streams, counters, plan.lora is not None
        self.reads: SharedReads | None = None
        largest = max(unit.pieces[0].numel for unit in plan.layers)
        experts = [part for unit in plan.layers for part in unit.parts[1:]]
        expert_slots = 2 if experts else 0
        largest_part = max((part.numel for part in experts), default=0)

        sizes = dict(plan.slot_sizes)
        layers, edge = num_layer_slots * largest + expert_slots * largest_part, sizes.pop("edge")
        memory = torch.zeros(max(layers, edge) if compact else layers + edge, dtype=dtype, device=device)
        parts = memory[:layers].split([largest] * num_layer_slots + [largest_part] * expert_slots)
        names = [f"layer slot {index}" for index in range(num_layer_slots)]
        names += [f"expert slot {index}" for index in range(expert_slots)]
        in_turn = [Slot(name, part) for name, part in zip(names, parts, strict=True)]
        self.layer_slots, self.expert_slots = in_turn[:num_layer_slots], in_turn[num_layer_slots:]
        edge_slot = Slot("edge slot", memory[:edge] if compact else memory[layers:])
        if compact:
            edge_slot.overlapping = in_turn
            for slot in in_turn:
                slot.overlapping = [edge_slot]
        others = {"edge": edge_slot}
        for name, numel in sizes.items():
            others[name] = Slot(f"{name} slot", torch.zeros(numel, dtype=dtype, device=device))
        self._slots = {unit.name: others[unit.slot] for unit in plan.units}
        self._slots |= {unit.name: self.layer_slots[i % num_layer_slots] for i, unit in enumerate(plan.layers)}
        self._slots |= {part.name: self.expert_slots[i % 2] for i, part in enumerate(experts)}
        self._all_slots = [*in_turn, *others.values()]
        # A layer's spans are the same in every layer of its structure group, so any layer of the group will do.
        self._templates: dict[tuple[int, str, int], nn.Module] = {}
        for piece in (piece for unit in plan.layers for piece in unit.pieces):
            key = self._template_key(piece)
            if key not in self._templates:
                self._templates[key] = bind(plan.structures[piece.structure], piece, self.slot(piece).buffer)
                if plan.router_loss is not None:
                    plan.router_loss.record(self._templates[key])
        head_views = views(plan.head, self.slot(plan.head).buffer)
        self.norm = copy.deepcopy(plan.norm)
        self.norm.weight = nn.Parameter(head_views["norm.weight"], requires_grad=plan.norm.weight.requires_grad)
        self.embedding_weight = views(plan.embedding, self.slot(plan.embedding).buffer)["embed_tokens.weight"]
        self.head_weight = self.embedding_weight if plan.tied else head_views["lm_head.weight"]
        self.vision: PreTrainedModel | None = None
        if plan.vision is not None:
            buffers = {unit.name: self.slot(unit).buffer for unit in plan.vision.units}
            self.vision = bind_vision(plan.vision, buffers, device)

    def train(self, mode: bool, *, adapters: bool) -> None:
        """Put the templates and the vision part in training or evaluation mode, with or without LoRA adapters."""
        for module in (*self._templates.values(), *([] if self.vision is None else [self.vision])):
            module.train(mode)
            if self._has_adapters:
                enable_adapters(module, adapters)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(storage.nbytes() for storage in {slot.buffer.untyped_storage() for slot in self._all_slots})

    def storages(self) -> list[StorageWeakRef]:
        """The memory of the slots, as references that do not keep it."""
        return [StorageWeakRef(slot.buffer.untyped_storage()) for slot in self._all_slots]

    def disjoint(self, one: UnitPlan, other: UnitPlan) -> bool:
        """Whether the weights of both may be on the device at the same time."""
        first, second = self.slot(one), self.slot(other)
        return first is not second and second not in first.overlapping

    def slot(self, unit: UnitPlan) -> Slot:
        """Where the weights of `unit` go."""
        return self._slots[unit.name]

    def held(self) -> list[str | None]:
        """For each slot, whose weights are in it or on their way there."""
        return [slot.unit for slot in self._all_slots]

    def holds(self, unit: UnitPlan) -> bool:
        """Whether the weights of `unit` are in their slot or on their way there."""
        return self.slot(unit).unit == unit.name

    def load(self, unit: UnitPlan, source: Tensor) -> None:
        """Start the transfer of `unit` from its host arena `source` into its slot; nothing if it is already there.

        `unit` may be a part of a layer, whose whole arena `source` is.
        """
        if self.holds(unit):
            return
        ranges, slot = unit.ranges(), self.slot(unit)
        for each in (slot, *slot.overlapping):
            if each.free is not None:
                self._streams.weight.wait(each.free, f"{each.name} free")
        for each in slot.overlapping:
            each.unit = None
        slot.ready = self._read(unit.name, slot.buffer, source, ranges)
        slot.unit = unit.name

    def _read(self, name: str, buffer: Tensor, source: Tensor, ranges: list[Range]) -> Event:
        numel = sum(each.numel for each in ranges)
        if self.reads is None:
            self._streams.weight.run(partial(_copy, buffer, source, ranges))
            self._counters.h2d_bytes += source.itemsize * numel
            return self._streams.weight.record()
        # Of a unit that crosses whole: several ranks stream no experts apart.
        self._counters.h2d_bytes += source.itemsize * self.reads.elements(numel)
        return self.reads.read(name, buffer[:numel], source)

    def use(self, unit: UnitPlan) -> None:
        """Let the compute stream wait until the weights of `unit` have arrived."""
        slot = self.slot(unit)
        if slot.ready is not None:
            self._streams.compute.wait(slot.ready, f"{slot.name} ready")
            slot.ready = None

    def layer(self, unit: UnitPlan) -> nn.Module:
        """The template that runs a decoder layer or its part, between `use` and `done`."""
        return self._templates[self._template_key(unit.pieces[0])]

    def _template_key(self, piece: UnitPlan) -> tuple[int, str, int]:
        return piece.structure, self.slot(piece).name, piece.numel

    def done(self, unit: UnitPlan) -> None:
        """The work appended to the compute stream so far has used the weights of `unit`."""
        self.slot(unit).free = self._streams.compute.record()

    def forget(self) -> None:
        """The weights on the host have changed: what the slots hold is of no use any more."""
        for slot in self._all_slots:
            slot.unit = None


def views(unit: UnitPlan, buffer: Tensor) -> dict[str, Tensor]:
    """The parameters of `unit` by their local names, as views into a flat buffer of `unit.numel` elements or more."""
    return {span.local: buffer[span.offset : span.offset + span.numel].view(span.shape) for span in unit.spans}


def bind(template: nn.Module, unit: UnitPlan, buffer: Tensor) -> nn.Module:
    """What computes with `unit` in a copy of `template` (on the meta device), its parameters as views into `buffer`."""
    module = unit.module_of(copy.deepcopy(template))
    trainable = {span.local: span.trainable for span in unit.spans}
    for local, view in views(unit, buffer).items():
        path, _, name = local.rpartition(".")
        setattr(module.get_submodule(path), name, nn.Parameter(view, requires_grad=trainable[local]))
    unpacked_rows.install(module)
    return module


def return_memory(slots: list[StorageWeakRef], device: str) -> None:
    """Give freed memory of `device` back to others. `slots`: of a ring that nobody needs any more."""
    if not all(storage.expired() for storage in slots):
        gc.collect()  # cycles of Python objects, such as torch.compile leaves, keep modules with views into slots
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB per stream that torch never frees by itself
        torch.cuda.empty_cache()


def _copy(slot: Tensor, source: Tensor, ranges: list[Range]) -> None:
    # Through `data`: autograd must not take the refill for a change of a weight that it keeps for a backward pass. By
    # then the slot holds the same weights again.
    for arena, device, numel in ranges:
        slot.data[device : device + numel].copy_(source[arena : arena + numel], non_blocking=True)

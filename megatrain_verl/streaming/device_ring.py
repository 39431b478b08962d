"""Device slots that hold one unit's weights at a time, and the template layers whose parameters are views into them.

Two slots serve all decoder layers: while one is computed with, the other is filled. A third holds the embedding at
the start of the forward pass and the head at its end (for tied models both at once). Nothing is unflattened or
copied on the device.
"""

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatrain_verl.streaming.model_plan import ModelPlan, UnitPlan
from megatrain_verl.streaming.streams import Event, Streams


@dataclass
class TransferCounters:
    """Bytes of weights sent to the device and of gradients sent to the host since the engine was made."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0


@dataclass
class Slot:
    """A flat device buffer. `ready`: its weights have arrived; `free`: the computation has used them."""

    name: str
    buffer: Tensor
    ready: Event | None = None
    free: Event | None = None


class DeviceRing:
    """The slots of one engine. For each visit of a unit: `load` ahead of time, `use`, compute, `done`."""

    def __init__(
        self, plan: ModelPlan, streams: Streams, counters: TransferCounters, device: str, dtype: torch.dtype
    ) -> None:
        self._plan, self._streams, self._counters = plan, streams, counters
        largest = max(unit.numel for unit in plan.layers)
        edge = max(plan.embedding.numel, plan.head.numel)
        names = {"layer slot 0": largest, "layer slot 1": largest, "edge slot": edge}
        *self._layer_slots, self._edge_slot = (
            Slot(name, torch.zeros(numel, dtype=dtype, device=device)) for name, numel in names.items()
        )
        self._loads = 0
        self._held: dict[str, Slot] = {}  # unit name -> slot, from `load` to `done`
        # A layer's spans are the same in every layer of its structure group, so any layer of the group will do.
        layouts = {unit.structure: unit for unit in plan.layers}
        self._templates = {
            (structure, slot.name): bind(plan.structures[structure], unit, slot.buffer)
            for structure, unit in layouts.items()
            for slot in self._layer_slots
        }
        head_views = views(plan.head, self._edge_slot.buffer)
        self.norm = copy.deepcopy(plan.norm)
        self.norm.weight = nn.Parameter(head_views["norm.weight"])
        self.embedding_weight = views(plan.embedding, self._edge_slot.buffer)["embed_tokens.weight"]
        self.head_weight = self.embedding_weight if plan.tied else head_views["lm_head.weight"]

    def train(self, mode: bool) -> None:
        """Put the templates in training or evaluation mode."""
        for template in self._templates.values():
            template.train(mode)

    def load(self, unit: UnitPlan, source: Tensor) -> None:
        """Start the transfer of `source` (host arena of `unit`) into the next slot; nothing if it is already there."""
        if unit.name in self._held:
            return
        if unit.structure is None:
            slot = self._edge_slot
        else:
            slot = self._layer_slots[self._loads % len(self._layer_slots)]
            self._loads += 1
        if slot.free is not None:
            self._streams.weight.wait(slot.free, f"{slot.name} free")
        self._streams.weight.run(partial(_copy, slot.buffer, source))
        self._counters.h2d_bytes += source.nbytes
        slot.ready = self._streams.weight.record()
        self._held[unit.name] = slot

    def use(self, unit: UnitPlan) -> None:
        """Let the compute stream wait until the weights of `unit` have arrived."""
        slot = self._held[unit.name]
        if slot.ready is not None:
            self._streams.compute.wait(slot.ready, f"{slot.name} ready")
            slot.ready = None

    def layer(self, unit: UnitPlan) -> nn.Module:
        """The template that runs a decoder layer, between `use` and `done`."""
        return self._templates[unit.structure, self._held[unit.name].name]

    def done(self, unit: UnitPlan) -> None:
        """The work appended to the compute stream so far is the last that reads the weights of `unit`."""
        self._held.pop(unit.name).free = self._streams.compute.record()


def views(unit: UnitPlan, buffer: Tensor) -> dict[str, Tensor]:
    """The parameters of `unit` by their local names, as views into a flat buffer of `unit.numel` elements or more."""
    return {span.local: buffer[span.offset : span.offset + span.numel].view(span.shape) for span in unit.spans}


def bind(template: nn.Module, unit: UnitPlan, buffer: Tensor) -> nn.Module:
    """A copy of `template` (on the meta device) whose parameters are views into `buffer`."""
    module = copy.deepcopy(template)
    for local, view in views(unit, buffer).items():
        path, _, name = local.rpartition(".")
        setattr(module.get_submodule(path), name, nn.Parameter(view))
    return module


def _copy(slot: Tensor, source: Tensor) -> None:
    slot[: source.numel()].copy_(source, non_blocking=True)

"""Gradients on their way to the host: FP32 accumulators on the device, the transfer, and the global norm.

The micro-batches of a wave add up in a unit's accumulator, in FP32. When the unit is done, its sum of squares is
taken on the device and the gradient goes to its host arena. With `resident` every unit has an accumulator of its own,
in which the waves of a call add up, and only the last wave sends them. If the arena already holds the gradient of an
earlier wave or call, the new one goes through a pool of pinned slabs instead, a host thread adds each slab to the
arena, and the norm is taken on the host after the last addition.

In a group of several ranks a unit's gradient is first summed over them, and each rank sends its own part of the sum.
"""

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.device_ring import TransferCounters
from megatrain_verl.streaming.group.exchange import GradientExchange
from megatrain_verl.streaming.group.group import Group
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.host_store import ParameterState, UnitState
from megatrain_verl.streaming.model_plan import ModelPlan
from megatrain_verl.streaming.model_units import UnitPlan
from megatrain_verl.streaming.streams import Event, Streams
from megatrain_verl.streaming.unit_updates import UnitUpdates

STAGING_ELEMENTS = 32 << 20  # converted and sent at a time: converting is 20 times faster than sending
SLAB_ELEMENTS = 16 << 20
SQUARES_ELEMENTS = 16 << 20  # of which the sum of squares is taken at a time: 128 MiB in float64


@dataclass
class Accumulator:
    """A float32 buffer on the device for the gradient of one unit. `free`: its last content has left.

    `overlapping` lie in the same memory and are used in turn.
    """

    name: str
    buffer: Tensor
    free: Event | None = None
    overlapping: "list[Accumulator]" = field(default_factory=list)


@dataclass
class Slab:
    """A float32 buffer on the host between device and arena. `free`: its last content has been added."""

    name: str
    host: HostBuffer
    free: Event | None = None


def gradient_views(unit: UnitPlan, accumulator: Accumulator | None) -> dict[str, Tensor]:
    """The places in `accumulator` for the gradients of `unit` by their local names; those of frozen parameters are not
    there.
    """
    trained = [span for span in unit.spans if span.trainable]
    return {span.local: accumulator.buffer[span.offset : span.offset + span.numel].view(span.shape) for span in trained}


class GradientPath:
    """Accumulators, transfer and norm of all gradients of one engine.

    `begin_call`; `begin_wave`, then for each unit `begin`, add to its accumulator on the compute stream, `finish`;
    `end_wave` after the last unit; `end_call`. Host state outlives `release_device`.
    """

    def __init__(
        self,
        plan: ModelPlan,
        state: ParameterState,
        streams: Streams,
        counters: TransferCounters,
        config: StreamingConfig,
        group: Group,
        device: str,
    ) -> None:
        self._plan, self._state, self._streams, self._counters = plan, state, streams, counters
        self._num_slabs, self._group = config.num_grad_slabs, group
        self._exchange = GradientExchange(group, streams.grad, device) if group.size > 1 else None
        self._waves_left = 0  # of this call, in the rank that sends most often
        self._finished: list[UnitState] = []  # units of this wave, in the order in which they were finished
        self._position = {unit.plan.name: position for position, unit in enumerate(state.units)}
        pieces = [piece.name for unit in state.units for piece in unit.plan.pieces]
        self._square_of = {name: position for position, name in enumerate(pieces)}
        self._slabs: list[Slab] = []
        self._slab_uses = 0
        # Do the arenas hold gradients that were neither zeroed nor used, and were some added on the host?
        self.pending = False
        self._added_on_host = False
        self._landed: Event | None = None
        self._on_device = self._resident = False
        self._accumulators: dict[str, Accumulator] = {}

    def acquire_device(self, device: str, resident: bool, compact: bool = False) -> None:
        """Allocate the float32 accumulators and a staging buffer, unless they are there.

        With `resident` one accumulator per unit, else two for the layers, and one for each slot of the others, of which
        that of embedding and head lies over the layers' if `compact`.
        """
        if self._on_device and self._resident == resident:
            return
        if self._on_device:
            self._streams.host_wait(self._streams.grad.record(), "gradients sent")
            self.release_device()
        self._resident = resident
        largest = max(piece.trained for unit in self._plan.layers for piece in unit.pieces)
        sizes = self._plan.trained_slot_sizes
        if resident:
            self._accumulators = {
                unit.name: Accumulator("resident accumulator", torch.zeros(unit.trained, device=device))
                for unit in self._plan.units
            }
        else:
            self._accumulators = _used_in_turn(largest, dict(sizes), device, compact)
        dtype = self._state.grad_dtype
        converted = 0 if dtype is torch.float32 else min(STAGING_ELEMENTS, max(largest, *sizes.values()))
        self._staging = torch.empty(converted, dtype=dtype, device=device)
        self._squares = torch.zeros(len(self._square_of), dtype=torch.float64, device=device)
        self._register = device == "cuda"
        self._visits = 0
        if device == "cuda":
            torch.cuda.current_stream().synchronize()  # the buffers are zeroed before other streams touch them
        self._on_device = True

    def release_device(self) -> None:
        """Drop what `acquire_device` allocated, once the device is done with it; keep the norm."""
        if self._on_device:
            self._accumulators.clear()
            del self._staging
            self._on_device = False
            self._squares = self._squares.cpu()

    @property
    def device_bytes(self) -> int:
        """Bytes of accumulators and staging buffer on the device."""
        staging = self._staging.nbytes if self._on_device else 0
        memory = {each.buffer.untyped_storage() for each in self._accumulators.values()}
        return staging + sum(storage.nbytes() for storage in memory)

    def check_addable(self) -> None:
        """Refuse to add to gradients that are there already, if their type would lose small terms.

        Raises:
            ValueError: the arenas are bfloat16; says what to do.
        """
        dtype = self._state.grad_dtype
        if self.pending and dtype is not torch.float32:
            raise ValueError(
                "gradients of several forward_backward calls are added on the host, which loses small terms in "
                f"{dtype}: set grad_dtype=float32, or call zero_grad before each forward_backward"
            )

    def begin_call(self, sends: int, micro_batches: list[MicroBatch], next_lr: float | None) -> float:
        """A call starts in which this rank sends every unit's gradient `sends` times.

        Returns:
            Which part of all ranks' tokens are in `micro_batches`.

        Raises:
            ValueError: `next_lr`, for which units are updated ahead, is another one in another rank.
        """
        own = sum(batch.num_tokens for batch in micro_batches)
        given = [sends, own, math.nan if next_lr is None else next_lr]
        counts, tokens, rates = zip(*self._group.gather(given, "the start of a step"), strict=True)
        if len({str(rate) for rate in rates}) > 1:
            found = ", ".join("None" if math.isnan(rate) else str(rate) for rate in rates)
            raise ValueError(f"the ranks have different next_lr ({found}): give the same learning rate to all of them")
        self._waves_left = int(max(counts))
        return own / sum(tokens)

    def begin_wave(self, updates: UnitUpdates, *, first: bool, last: bool) -> None:
        """A wave of a call starts: resident sums are zeroed before the first and sent after the last.

        `updates` read what is sent. They may do so ahead, as soon as the whole gradient of a unit is in the host arena;
        not if any rank sends in several waves.
        """
        self._zeroes, self._sends, self._finished = first or not self._resident, last or not self._resident, []
        self._updates, self._ahead = updates, last and not self.pending and self._waves_left == 1

    def begin(self, unit: UnitState, part: int = 0) -> Accumulator | None:
        """The accumulator for `unit`, zeroed if it starts a sum; the compute stream waits until it may be used.

        For a layer in parts it is that of one part, of which number 0 comes last. None for what is frozen.
        """
        if unit.plan.pieces[part].trained == 0:
            return None
        accumulator = self._accumulator(unit)
        if self._zeroes:
            for each in (accumulator, *accumulator.overlapping):
                if each.free is not None:
                    self._streams.compute.wait(each.free, f"{each.name} free")
            self._streams.compute.run(accumulator.buffer.zero_)
        return accumulator

    def finish(self, unit: UnitState, accumulator: Accumulator | None, part: int = 0) -> None:
        """The wave's gradient of `unit` or its `part` is complete: send it to the host, if no other wave adds to it."""
        if accumulator is None or not self._sends:
            return
        if not self.pending:  # the unit's last update reads the arena; not every unit's weights were needed since
            self._updates.wait(unit, "its next gradient")
        self._finished.append(unit)
        piece = unit.plan.pieces[part]
        own = self._state.parts[self._position[unit.plan.name]]
        gradient, arena = accumulator.buffer[: piece.trained], own.grad
        square = self._squares[self._square_of[piece.name]]
        if self._exchange is None:
            self._streams.compute.run(lambda: square.copy_(_sum_of_squares(gradient)))
        self._streams.grad.wait(self._streams.compute.record(), f"{accumulator.name} complete")
        if self._exchange is not None:
            gradient = self._exchange.reduce(gradient)
            self._streams.grad.run(lambda: square.copy_(_sum_of_squares(gradient)))
        for start, device, numel in piece.trained_ranges():  # in a group this rank's share of both is shorter
            sent, target = gradient[device : device + numel], arena[start : start + numel]
            if self.pending:
                self._send_through_slabs(sent, target)
            else:
                self._streams.grad.run(partial(_send, sent, target, self._staging))
            self._counters.d2h_bytes += target.nbytes
        accumulator.free = self._streams.grad.record()
        if part == 0 and self._ahead:
            self._updates.ahead(own, accumulator.free)

    def end_wave(self) -> None:
        """All units of a wave have been finished."""
        if not self._sends:
            return
        self._landed = (self._streams.adder if self.pending else self._streams.grad).record()
        self._added_on_host = self.pending
        self.pending = True
        self._waves_left -= 1

    def end_call(self) -> None:
        """All waves have ended. If other ranks have more of them, this one adds zeros to theirs."""
        order = self._finished  # that of the other ranks
        while self._waves_left > 0:
            self.begin_wave(self._updates, first=True, last=True)
            for unit in order:
                self.finish(unit, self.begin(unit))
            self.end_wave()

    def _accumulator(self, unit: UnitState) -> Accumulator:
        if self._resident:
            return self._accumulators[unit.plan.name]
        if unit.plan.structure is None:
            return self._accumulators[unit.plan.slot]
        self._visits += 1
        return self._accumulators[f"layer {self._visits % 2}"]

    def zero(self) -> None:
        """Forget the gradients: the next ones replace them. Touches no memory, so a pending AdamW still reads them."""
        self.pending = False
        self._added_on_host = False

    def wait_landed(self) -> None:
        """Block until the gradients are on the host."""
        if self._landed is not None:
            self._streams.host_wait(self._landed, "gradients on the host")
            self._landed = None

    def norm(self) -> float:
        """Global L2 norm of the gradients on the host, after `wait_landed`; the same bits in every rank."""
        if not self._added_on_host:
            squares = self._squares.sum().item()
        else:
            squares = sum(_sum_of_squares(part.grad).item() for part in self._state.parts if part.grad is not None)
        return math.sqrt(sum(value for (value,) in self._group.gather([squares], "the gradient norm")))

    def close(self) -> None:
        """Release the slabs."""
        for slab in self._slabs:
            slab.host.close()
        self._slabs = []
        if self._exchange is not None:
            self._exchange.close()

    def _send_through_slabs(self, gradient: Tensor, arena: Tensor) -> None:
        grad, adder = self._streams.grad, self._streams.adder
        slabs = self._slabs or self._allocate_slabs()
        for start in range(0, gradient.numel(), SLAB_ELEMENTS):
            part = gradient[start : start + SLAB_ELEMENTS]
            slab = slabs[self._slab_uses % len(slabs)]
            self._slab_uses += 1
            landing = slab.host.view(torch.float32)[: part.numel()]
            if slab.free is not None:
                grad.wait(slab.free, f"{slab.name} free")
            grad.run(partial(landing.copy_, part, non_blocking=True))
            adder.wait(grad.record(), f"{slab.name} filled")
            adder.run(partial(arena[start : start + part.numel()].add_, landing))
            slab.free = adder.record()

    def _allocate_slabs(self) -> list[Slab]:
        size = 4 * min(SLAB_ELEMENTS, max(unit.plan.trained for unit in self._state.units))
        for index in range(self._num_slabs):
            name = f"gradient slab {index}"
            self._slabs.append(Slab(name, HostBuffer(size, name, register=self._register)))
        return self._slabs


def _used_in_turn(layer: int, others: dict[str, int], device: str, compact: bool) -> dict[str, Accumulator]:
    """Two accumulators of `layer` elements and one of each size in `others`; `compact`: "edge" lies over the two."""
    edge = others.pop("edge")
    memory = torch.zeros(max(2 * layer, edge) if compact else 2 * layer + edge, device=device)
    layers = [Accumulator(f"layer {index} accumulator", memory[index * layer :][:layer]) for index in range(2)]
    last = Accumulator("edge accumulator", memory[:edge] if compact else memory[2 * layer :])
    if compact:
        last.overlapping = layers
        for accumulator in layers:
            accumulator.overlapping = [last]
    rest = {name: Accumulator(f"{name} accumulator", torch.zeros(size, device=device)) for name, size in others.items()}
    return {"layer 0": layers[0], "layer 1": layers[1], "edge": last, **rest}


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """In float64, (). torch converts what it sums to a float64 copy, hence in parts."""
    parts = gradient.split(SQUARES_ELEMENTS)
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square().sum()


def _send(gradient: Tensor, arena: Tensor, staging: Tensor) -> None:
    """Copy `gradient` (float32, device) to `arena` (host), converted on the device if the arena's type is narrower."""
    if staging.numel() == 0:
        arena.copy_(gradient, non_blocking=True)
        return
    for start in range(0, gradient.numel(), staging.numel()):
        part = gradient[start : start + staging.numel()]
        converted = staging[: part.numel()].copy_(part)
        arena[start : start + part.numel()].copy_(converted, non_blocking=True)

"""The device's part of the host's AdamW: while the host's cores update the front of a unit, the GPU updates its end.

After the gradient norm is known both copy engines are nearly idle, and the host's cores cannot use all of the host's
memory rate. So the last part of each unit goes through the device in chunks: state and gradient in, one kernel, state
out. Each chunk takes one of three lanes; a lane is a stream with its own staging buffers, so that no two chunks share
anything and one lane sends while another fetches.

Both kernels compute the same bits, whatever part of a unit they get. The part is adapted after every unit: more for
the device if it was done before the host, less otherwise.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain_verl.streaming.host_adamw import HostAdamW, decay_runs
from megatrain_verl.streaming.host_store import TRAINED, UnitState
from megatrain_verl.streaming.native_adamw import LINE, Settings
from megatrain_verl.streaming.optimizer_step import AdamWStep
from megatrain_verl.streaming.streams import Event, Streams

CHUNK_ELEMENTS = 8 << 20
FIRST_SHARE, LEAST_SHARE, MOST_SHARE = 0.35, 0.02, 0.9
LESS, MORE = 0.94, 1.03

ChunkKernel = Callable[[UnitState, int, Settings], None]  # updates the first n elements of staged arenas


@dataclass
class Lane:
    """A queue and the staging buffers that only its chunks use."""

    index: int
    staged: UnitState


class DeviceShare:
    """Shares the update of each unit between the host's kernel and the device's.

    Args:
        adamw: the host's kernel.
        kernel: updates the staged arenas of a chunk on the device, in place.
        streams: the `lanes` run the chunks.
        device: of the staging buffers.
    """

    def __init__(self, adamw: HostAdamW, kernel: ChunkKernel, streams: Streams, device: str) -> None:
        self._adamw, self._kernel, self._streams, self._device = adamw, kernel, streams, device
        self._share = FIRST_SHARE
        self._lanes: list[Lane] = []
        self._chunks = 0
        self._sent: dict[str, tuple[int, AdamWStep]] = {}  # unit -> first element of the device's part, of which step
        self._pending: dict[str, list[Event]] = {}  # unit -> marks behind its last chunks

    def update(self, unit: UnitState, step: AdamWStep, *, following: UnitState | None) -> None:
        """Update `unit`; the device goes on with `following`. Returns when the host's part is done: see `pending`."""
        self._send(unit, step)
        if following is not None:
            self._send(following, step)
        border, _ = self._sent[unit.plan.name]
        self._adamw.update(unit, step, end=border)
        if border < unit.plan.trained:
            late = not all(event.query() for event in self._pending[unit.plan.name])
            self._share = min(MOST_SHARE, max(LEAST_SHARE, self._share * (LESS if late else MORE)))

    def pending(self, unit: UnitState) -> list[Event]:
        """Marks behind which the device's part of the last update of `unit` is done."""
        return self._pending.get(unit.plan.name, [])

    @property
    def device_bytes(self) -> int:
        """Bytes of the staging buffers."""
        arenas = [getattr(lane.staged, kind) for lane in self._lanes for kind in (*TRAINED, "grad")]
        return sum(arena.nbytes for arena in arenas if arena is not None)

    def release(self) -> None:
        """Free the staging buffers, once the chunks that use them are done."""
        for events in self._pending.values():
            for event in events:
                self._streams.host_wait(event, "AdamW on the device done")
        self._pending.clear()
        self._lanes.clear()

    def _send(self, unit: UnitState, step: AdamWStep) -> None:
        """Start the device's part of the update, unless it has been."""
        if self._sent.get(unit.plan.name, (0, None))[1] is step:
            return
        unit.keep_reference()  # before either side writes
        trained = unit.plan.trained
        border = trained - math.floor(self._share * trained / LINE) * LINE
        self._sent[unit.plan.name] = border, step
        lanes = self._lanes or self._make_lanes(unit)
        events: dict[int, Event] = {}
        for start, end, decayed in decay_runs(unit.plan, everything=step.decay_norms_and_biases, start=border):
            settings = Settings.of(step, step.weight_decay if decayed else 0.0)
            for first in range(start, end, CHUNK_ELEMENTS):
                lane = lanes[self._chunks % len(lanes)]
                self._chunks += 1
                last = min(first + CHUNK_ELEMENTS, end)
                queue = self._streams.lanes[lane.index]
                queue.run(lambda lane=lane, where=slice(first, last), s=settings: self._chunk(lane, unit, where, s))
                events[lane.index] = queue.record()
        self._pending[unit.plan.name] = list(events.values())

    def _chunk(self, lane: Lane, unit: UnitState, where: slice, settings: Settings) -> None:
        length = where.stop - where.start
        staged = {kind: getattr(lane.staged, kind) for kind in (*TRAINED, "grad")}
        for kind, buffer in staged.items():
            if buffer is not None:
                buffer[:length].copy_(getattr(unit, kind)[where], non_blocking=True)
        self._kernel(lane.staged, length, settings)
        for kind in TRAINED:
            if staged[kind] is not None:
                getattr(unit, kind)[where].copy_(staged[kind][:length], non_blocking=True)

    def _make_lanes(self, unit: UnitState) -> list[Lane]:
        for index in range(len(self._streams.lanes)):
            staged = {
                kind: torch.empty(CHUNK_ELEMENTS, dtype=getattr(unit, kind).dtype, device=self._device)
                for kind in (*TRAINED, "grad")
                if getattr(unit, kind) is not None
            }
            self._lanes.append(Lane(index, UnitState(unit.plan, **staged)))
        return self._lanes


def make_share(wanted: bool | None, adamw: HostAdamW, streams: Streams, device: str) -> DeviceShare | None:
    """The device's part of the updates, or None. Not `wanted` means: on CUDA, where both kernels give the same bits.

    On CPU the chunks run through staging buffers too, with the host's kernel.

    Raises:
        ValueError: it is wanted, but the native kernel or Triton is missing.
    """
    missing = []
    if adamw.native is None or adamw.native.level == 0:
        missing.append("the native AdamW kernel on a processor with AVX2 and FMA")
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        missing.append("Triton")
    if wanted and missing:
        raise ValueError(f"device_adamw=true needs {' and '.join(missing)}; set it to null or false")
    if missing or not (device == "cuda" if wanted is None else wanted):
        return None
    if device == "cuda":
        from megatrain_verl.streaming.native.adamw_triton import update

        # With its index: the thread that allocates has a current device of its own, the first one.
        return DeviceShare(adamw, update, streams, f"cuda:{torch.cuda.current_device()}")

    def update_staged(staged: UnitState, length: int, settings: Settings) -> None:
        adamw.native.update_slices(staged, staged, 0, length, settings)

    return DeviceShare(adamw, update_staged, streams, device)

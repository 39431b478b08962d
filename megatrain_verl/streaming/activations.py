"""Layer inputs kept between the forward and the backward pass (checkpoints): on the device first, else on the host.

Everything is known when a pass starts: which inputs are kept and how large they are. The last layers' inputs, which
the backward pass needs first, stay on the device while its budget lasts. The others go through one of two device
buffers to page-locked host memory over the gradient stream, which is idle in the forward pass, and come back over the
weight stream shortly before they are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.host_store import DTYPES
from megatrain_verl.streaming.model_plan import ModelPlan
from megatrain_verl.streaming.pass_plan import PassPlan
from megatrain_verl.streaming.streams import Event, Streams, WorkQueue

Key = tuple[int, int]  # layer, micro-batch


@dataclass
class StagingSlot:
    """A device buffer through which spilled inputs pass. `free`: its content has been copied out or used."""

    name: str
    buffer: Tensor
    free: Event | None = None


@dataclass
class SpilledInput:
    """Where a spilled input lies on the host (T, H), and how far it is."""

    host: Tensor
    sent: Event | None = None
    slot: StagingSlot | None = None  # set while it is back on the device


class SpillArea:
    """Page-locked host memory for spilled inputs, grown to the largest pass and reused by the next ones.

    `check` gets the bytes by which it is about to grow and raises if the host does not have them.
    """

    def __init__(self, check: Callable[[int], None], *, register: bool) -> None:
        self._check, self._register = check, register
        self._buffer: HostBuffer | None = None

    def reserve(self, nbytes: int) -> Tensor:
        """A flat uint8 tensor of `nbytes`; the check may refuse the bytes that this adds."""
        held = 0 if self._buffer is None else self._buffer.nbytes
        if nbytes > held:
            self._check(nbytes - held)
            self.close()
            self._buffer = HostBuffer(nbytes, "spilled activations", register=self._register)
        return self._buffer.tensor[:nbytes]

    def close(self) -> None:
        """Release the memory."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


class ActivationStore:
    """The kept inputs of one pass.

    `keep`, `fetch` and `done` append work; the function that `fetch` returns gives the tensor (1, T, H) and is called
    by work on the compute stream.

    Args:
        streams: the queues.
        layers: whose inputs are kept, ascending.
        tokens: of each micro-batch.
        hidden_size, dtype, device: of the inputs.
        budget: bytes of inputs that may stay on the device.
        area: reserves host memory for the rest, given the bytes.
    """

    def __init__(
        self,
        streams: Streams,
        layers: list[int],
        tokens: list[int],
        hidden_size: int,
        dtype: torch.dtype,
        device: str,
        budget: float,
        area: Callable[[int], Tensor],
    ) -> None:
        self._streams = streams
        self._on_device: dict[Key, Tensor] = {}
        row_bytes = hidden_size * dtype.itemsize
        spilled: list[Key] = []
        for layer in reversed(layers):
            for m in reversed(range(len(tokens))):
                budget -= tokens[m] * row_bytes
                if budget < 0:
                    spilled.append((layer, m))
        self._spilled: dict[Key, SpilledInput] = {}
        self._slots: list[StagingSlot] = []
        self._slot_uses = 0
        if spilled:
            host = area(sum(tokens[m] for _, m in spilled) * row_bytes).view(dtype).view(-1, hidden_size)
            start = 0
            for layer, m in spilled:
                self._spilled[layer, m] = SpilledInput(host[start : start + tokens[m]])
                start += tokens[m]
            largest = torch.Size((max(tokens), hidden_size))
            self._slots = [
                StagingSlot(f"activation slot {index}", torch.zeros(largest, dtype=dtype, device=device))
                for index in range(2)
            ]
            if device == "cuda":
                torch.cuda.current_stream().synchronize()  # zeroed before other streams touch them

    @classmethod
    def of_pass(
        cls,
        streams: Streams,
        model: ModelPlan,
        config: StreamingConfig,
        plan: PassPlan,
        micro_batches: list[MicroBatch],
        device: str,
        area: Callable[[int], Tensor],
    ) -> "ActivationStore":
        """That of a training pass: the inputs of every `checkpoint_interval`-th layer that is not kept as a whole."""
        layers = list(range(0, len(model.layers) - plan.kept_layers, config.checkpoint_interval))
        tokens = [batch.num_tokens for batch in micro_batches]
        inputs = (model.hidden_size, DTYPES[config.dtype], device)
        return cls(streams, layers, tokens, *inputs, plan.input_bytes, area)

    @property
    def spilled_bytes(self) -> int:
        """Bytes that this pass keeps on the host."""
        return sum(spilled.host.nbytes for spilled in self._spilled.values())

    def keep(self, layer: int, m: int, source: Callable[[], Tensor]) -> None:
        """Keep what `source` returns when the compute stream comes to it."""
        spilled = self._spilled.get((layer, m))
        if spilled is None:
            self._streams.compute.run(partial(self._keep_on_device, layer, m, source))
            return
        slot = self._next_slot(self._streams.compute)
        staged = slot.buffer[: spilled.host.shape[0]]
        self._streams.compute.run(partial(_stage, staged, source))
        self._streams.grad.wait(self._streams.compute.record(), f"{slot.name} filled by compute")
        self._streams.grad.run(partial(spilled.host.copy_, staged, non_blocking=True))
        slot.free = spilled.sent = self._streams.grad.record()

    def prefetch(self, layer: int, count: int) -> None:
        """Start to bring back the first inputs of `layer`, as many of `count` as there are device buffers."""
        for m in range(min(count, len(self._slots))):
            self._bring_back(layer, m)

    def fetch(self, layer: int, m: int) -> Callable[[], Tensor]:
        """Make the compute stream wait for the kept input of `layer`."""
        spilled = self._bring_back(layer, m)
        if spilled is None:
            return lambda: self._on_device[layer, m]
        slot, tokens = spilled.slot, spilled.host.shape[0]
        if spilled.sent is not None:
            self._streams.compute.wait(spilled.sent, f"{slot.name} filled by transfer")
            spilled.sent = None
        return lambda: slot.buffer[:tokens][None]

    def done(self, layer: int, m: int, *, last: bool) -> None:
        """The work appended to the compute stream so far has used the input; with `last`, forget it."""
        spilled = self._spilled.get((layer, m))
        if spilled is not None:
            spilled.slot.free, spilled.slot = self._streams.compute.record(), None
        elif last:
            self._streams.compute.run(partial(self._on_device.__delitem__, (layer, m)))

    def _keep_on_device(self, layer: int, m: int, source: Callable[[], Tensor]) -> None:
        self._on_device[layer, m] = source()

    def _bring_back(self, layer: int, m: int) -> SpilledInput | None:
        spilled = self._spilled.get((layer, m))
        if spilled is None or spilled.slot is not None:
            return spilled
        weight = self._streams.weight
        if spilled.sent is not None:
            weight.wait(spilled.sent, "spilled input on the host")
        spilled.slot = self._next_slot(weight)
        weight.run(partial(spilled.slot.buffer[: spilled.host.shape[0]].copy_, spilled.host, non_blocking=True))
        spilled.sent = weight.record()
        return spilled

    def _next_slot(self, user: WorkQueue) -> StagingSlot:
        slot = self._slots[self._slot_uses % len(self._slots)]
        self._slot_uses += 1
        if slot.free is not None:
            user.wait(slot.free, f"{slot.name} free")
        return slot


def _stage(staged: Tensor, source: Callable[[], Tensor]) -> None:
    staged.copy_(source()[0])

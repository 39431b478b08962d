"""The reference policy's weights in a file instead of host memory: 2 bytes per parameter in bfloat16.

The file is written once, when the weights are loaded. A reference pass reads it unit by unit in forward order, into two
page-locked buffers: while one unit is sent to the device and used there, the next one is read. After the last one comes
the first, for the next pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatrain_verl.streaming.device_ring import DeviceRing
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.model_units import UnitPlan
from megatrain_verl.streaming.streams import Event, Streams
from megatrain_verl.streaming.unnamed_file import UnnamedFile

OPTION = "reference_folder"


@dataclass
class StagedUnit:
    """A host buffer. `unit`: whose weights are in it or will be, `read`: they are, `free`: they have been sent."""

    name: str
    memory: HostBuffer
    unit: str | None = None
    read: Event | None = None
    free: Event | None = None


class ReferenceFile:
    """The weights of some units in a file.

    Args:
        folder: where the file lies.
        units: of the file, in forward order; of each the whole arena.
        dtype: of the weights.
        register: page-lock the buffers for CUDA.

    Raises:
        ValueError: see `UnnamedFile`.
        MemoryError: see `HostBuffer`.
    """

    def __init__(self, folder: str, units: list[UnitPlan], dtype: torch.dtype, *, register: bool) -> None:
        self._dtype, self._written = dtype, False
        self._places: dict[str, tuple[int, int]] = {}  # unit -> first byte and number of bytes in the file
        end = 0
        for unit in units:
            self._places[unit.name] = end, unit.numel * dtype.itemsize
            end += unit.numel * dtype.itemsize
        self._file = UnnamedFile(folder, end, OPTION)
        names = list(self._places)
        self._following = dict(zip(names, [*names[1:], names[0]], strict=True))
        largest = max(nbytes for _, nbytes in self._places.values())
        # The first one is read into while the other one is sent.
        self._buffers = [
            StagedUnit(name, HostBuffer(largest, name, register=register))
            for name in ("reference buffer 0", "reference buffer 1")
        ]

    def __contains__(self, unit: UnitPlan) -> bool:
        return unit.name in self._places

    def keep(self, units: Iterable[tuple[UnitPlan, Tensor]]) -> None:
        """Write the weights (flat, on the CPU) of the file's units; nothing if that was done before.

        Raises:
            ValueError: see `UnnamedFile.write`.
        """
        if self._written:
            return
        for unit, weight in units:
            if unit in self:
                self._file.write(memoryview(weight.view(torch.uint8).numpy()), self._places[unit.name][0])
        self._file.sync()
        self._written = True

    def load(self, unit: UnitPlan, ring: DeviceRing, streams: Streams) -> None:
        """Start the transfer of `unit` to its device slot once it is read, and the reading of the next one."""
        if ring.holds(unit):
            return
        staged, other = self._buffers
        if staged.unit != unit.name:  # at first, or where the device still holds what was read ahead
            self._read(staged, unit.name, streams)
        streams.host_wait(staged.read, f"{staged.name} read")
        ring.load(unit, staged.memory.view(self._dtype))
        staged.free = streams.weight.record()
        self._buffers = [other, staged]
        self._read(other, self._following[unit.name], streams)

    def forget(self) -> None:
        """After a failed pass: what it had begun to read or send does not count."""
        for staged in self._buffers:
            staged.unit = staged.read = staged.free = None

    def close(self) -> None:
        """Release the buffers and the file; nothing reads it any more."""
        self._file.close()
        for staged in self._buffers:
            staged.memory.close()

    def _read(self, staged: StagedUnit, unit: str, streams: Streams) -> None:
        start, nbytes = self._places[unit]
        if staged.free is not None:
            streams.reader.wait(staged.free, f"{staged.name} free")
        streams.reader.run(partial(self._file.read, memoryview(staged.memory.tensor.numpy())[:nbytes], start))
        staged.unit, staged.read = unit, streams.reader.record()

"""Parameters, gradients and Adam state of the whole model in host memory: flat arenas, one per unit and kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.device_ring import DeviceRing
from megatrain_verl.streaming.group.group import ALONE, Group, part_of
from megatrain_verl.streaming.host_memory import HostBuffer, padded
from megatrain_verl.streaming.master_weights import join_master, split_master
from megatrain_verl.streaming.model_plan import ModelPlan
from megatrain_verl.streaming.model_units import ParameterSpan, UnitPlan
from megatrain_verl.streaming.reference_file import ReferenceFile
from megatrain_verl.streaming.streams import Streams

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TRAINED = ("weight", "low", "exp_avg", "exp_avg_sq")  # what an update writes
SPLIT_CHUNK = 4 << 20  # elements converted at a time, so that loading needs no FP32 copy of a large tensor


def arena_dtypes(config: StreamingConfig, *, trainable: bool, reference: bool) -> dict[str, torch.dtype]:
    """Kind of arena -> element type, for one unit. The sum of the element sizes is the host bytes per parameter.

    `weight` is the tensor that is streamed and exported: the bfloat16 high half of the master, or in float32 mode the
    master itself. A forward-only engine has nothing else.
    """
    compute = DTYPES[config.dtype]
    kinds = {"weight": compute}
    if trainable:
        if compute is torch.bfloat16:
            kinds["low"] = torch.int16
        kinds["exp_avg"] = kinds["exp_avg_sq"] = torch.float32
        kinds["grad"] = DTYPES[config.host_grad_dtype]
        if reference and config.reference_folder is None:
            kinds["reference"] = compute
    return kinds


def arena_elements(kind: str, numel: int, trained: int) -> int:
    """Elements of the arena of one kind for a unit of `numel`, of which the first `trained` are trained."""
    if kind == "weight":
        return numel
    if kind == "reference":  # is sent in place of the weights, in one piece
        return numel if trained else 0
    return trained


def units_with_spares(
    early_units: Sequence[int], unit_sizes: Sequence[int], trained_sizes: Sequence[int], config: StreamingConfig
) -> list[int]:
    """Numbers of the units for which `speculative_adamw_gb` pays spare arenas.

    They are the first of `early_units`, whose gradients come first; those of embedding and vision part come last. None
    has frozen parameters.
    """
    kinds = arena_dtypes(config, trainable=True, reference=False)
    bytes_per_element = sum(dtype.itemsize for kind, dtype in kinds.items() if kind in TRAINED)
    room, chosen = config.speculative_adamw_gb * 2**30, []
    for index in early_units:
        nbytes = unit_sizes[index] * bytes_per_element
        if (
            trained_sizes[index] == unit_sizes[index] and nbytes <= room
        ):  # the head may be too large where layers are not
            room -= nbytes
            chosen.append(index)
    return chosen


@dataclass
class UnitState:
    """The arenas of one unit, each flat, see `arena_elements`; `None` where the engine does not keep the kind."""

    plan: UnitPlan
    weight: Tensor
    low: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    grad: Tensor | None = None
    reference: Tensor | None = None
    # Until the first change of the weights the reference equals them, and `reference` holds nothing yet.
    reference_filled: bool = False
    # Arenas for the results of an update that may be dropped.
    spare: "UnitState | None" = None
    # The unit of which this is one rank's part, in the same memory.
    whole: "UnitState | None" = None
    # What is not trained, by name, in its own type; see `BufferPlan`.
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def trained(self) -> list[Tensor]:
        """The arenas that an update writes."""
        return [arena for arena in (self.weight, self.low, self.exp_avg, self.exp_avg_sq) if arena is not None]

    def take_spare(self) -> None:
        """Let what is in the spare arenas be the unit's state; its old arenas are the spare ones from now on.

        Of a rank's part: that of the whole unit. Every rank does so.
        """
        for unit in (self,) if self.whole is None else (self, self.whole):
            for kind in TRAINED:
                mine, other = getattr(unit, kind), getattr(unit.spare, kind)
                setattr(unit, kind, other)
                setattr(unit.spare, kind, mine)

    def part(self, start: int, end: int) -> "UnitState":
        """Elements [start, end) as a unit of its own, in the same memory."""
        arenas = {name: getattr(self, name) for name in (*TRAINED, "grad", "reference")}
        cut = {name: arena[start:end] for name, arena in arenas.items() if arena is not None}
        spare = None if self.spare is None else self.spare.part(start, end)
        return UnitState(part_of_plan(self.plan, start, end), **cut, spare=spare, whole=self)

    def view(self, arena: Tensor, span: ParameterSpan) -> Tensor:
        """The part of `arena` that belongs to one parameter, in the parameter's shape."""
        return arena[span.offset : span.offset + span.numel].view(span.shape)

    def write(self, span: ParameterSpan, value: Tensor) -> None:
        """Set the master of one parameter from `value` (its shape, any float dtype, on the CPU)."""
        flat, end = value.reshape(-1), span.numel
        for start in range(0, end, SPLIT_CHUNK):
            part = flat[start : min(start + SPLIT_CHUNK, end)]
            where = slice(span.offset + start, span.offset + start + part.numel())
            if not self.is_split(where.start):
                self.weight[where].copy_(part)
            else:
                split_master(part.to(torch.float32), self.weight[where], self.low[where])

    def is_split(self, element: int) -> bool:
        """Whether the master of this element is kept as two halves: not in float32 mode, nor if it is frozen."""
        return self.low is not None and element < self.low.numel()

    def master(self, start: int = 0, end: int | None = None) -> Tensor:
        """A float32 copy of elements [start, end) of the master weights (of the weights where they are not trained)."""
        values = self.weight[start:end].to(torch.float32, copy=True)
        if self.low is not None:
            low = self.low[start:end]
            join_master(self.weight[start : start + low.numel()], low, out=values[: low.numel()])
        return values

    def keep_reference(self) -> None:
        """Copy the weights to the reference arena, once; called before anything changes them."""
        if self.reference is not None and not self.reference_filled:
            self.reference.copy_(self.weight)
            self.reference_filled = True

    def source(self, *, reference: bool) -> Tensor:
        """What the weight stream reads: the weights, or the reference policy's."""
        if reference and self.reference is not None and self.reference_filled:
            return self.reference
        return self.weight


def part_of_plan(plan: UnitPlan, start: int, end: int) -> UnitPlan:
    """The plan of elements [start, end) of a unit: what is left of a vector is a vector, of a matrix one row."""
    spans = []
    for span in plan.spans:
        first, last = max(span.offset, start), min(span.offset + span.numel, end)
        if first < last:
            shape = torch.Size([*(1 for _ in span.shape[1:]), last - first])
            spans.append(replace(span, shape=shape, offset=first - start))
    return replace(plan, spans=spans, numel=end - start)


@dataclass
class ParameterState:
    """All arenas of a model. `units` is in forward order, the order in which everything walks them.

    `parts` is what this rank updates of each unit: the units themselves where it is alone.
    """

    units: list[UnitState] = field(default_factory=list)
    parts: list[UnitState] = field(default_factory=list)
    reference_file: ReferenceFile | None = None
    _buffers: list[HostBuffer] = field(default_factory=list)

    @classmethod
    def allocate(
        cls,
        plan: ModelPlan,
        config: StreamingConfig,
        *,
        trainable: bool,
        reference: bool,
        register: bool,
        group: Group = ALONE,
    ) -> "ParameterState":
        """Zeroed arenas for every unit of `plan`, the same in all of `group`; page-locked for CUDA if `register`.

        Raises:
            MemoryError: see `HostBuffer`; what was allocated before is released.
            ValueError: see `ReferenceFile`.
        """
        state = cls()
        kinds = arena_dtypes(config, trainable=trainable, reference=reference)

        def nbytes(unit: UnitPlan, kind: str) -> int:
            return arena_elements(kind, unit.numel, unit.trained) * kinds[kind].itemsize

        def arenas(unit: UnitPlan, kinds: dict[str, torch.dtype], suffix: str = "") -> UnitState:
            views = {}
            for kind, dtype in kinds.items():
                if nbytes(unit, kind) == 0:
                    continue
                label = f"{unit.name}.{kind}{suffix}"
                buffer = HostBuffer(nbytes(unit, kind), label, register=register, shared=group.arenas)
                state._buffers.append(buffer)
                views[kind] = buffer.view(dtype)
            return UnitState(unit, **views)

        try:
            if reference and config.reference_folder is not None:
                in_file = [unit for unit in plan.units if arena_elements("reference", unit.numel, unit.trained)]
                where = config.reference_folder, in_file, DTYPES[config.dtype]
                state.reference_file = ReferenceFile(*where, register=register)
            sizes = plan.early_units, plan.unit_sizes, plan.trained_sizes
            spared = units_with_spares(*sizes, config) if trainable else []
            written = {kind: dtype for kind, dtype in kinds.items() if kind in TRAINED}
            blocks = [(unit, kind) for unit in plan.units for kind in kinds]
            blocks += [(plan.units[index], kind) for index in spared for kind in written]
            arena_bytes = sum(padded(nbytes(*block)) for block in blocks)
            group.share_arenas(arena_bytes + padded(sum(_buffer_bytes(plan))))
            state.units = state.parts = [arenas(unit, kinds) for unit in plan.units]
            for index in spared:
                state.units[index].spare = arenas(plan.units[index], written, ".spare")
            if group.size > 1:
                group.gather([], "the memory of all arenas")
                state.parts = [unit.part(*part_of(unit.plan.trained, group.rank, group.size)) for unit in state.units]
            state._allocate_buffers(plan, group, register)
        except BaseException as error:
            group.fail(error)  # a rank that waits for this one names the reason, not only the end of its process
            state.close()
            raise
        return state

    def _allocate_buffers(self, plan: ModelPlan, group: Group, register: bool) -> None:
        """Room for the buffers of all units in one allocation; they are small."""
        planned = [(unit, buffer) for unit in self.units for buffer in unit.plan.buffers]
        if not planned:
            return
        sizes = _buffer_bytes(plan)
        memory = HostBuffer(sum(sizes), "buffers", register=register, shared=group.arenas)
        self._buffers.append(memory)
        for (unit, buffer), part in zip(planned, memory.tensor[: sum(sizes)].split(sizes), strict=True):
            values = part[: buffer.shape.numel() * buffer.dtype.itemsize].view(buffer.dtype)
            unit.buffers[buffer.name] = values.view(buffer.shape)

    def parameters(self) -> Iterator[tuple[UnitState, ParameterSpan]]:
        """Every parameter once, in forward order."""
        for unit in self.units:
            for span in unit.plan.spans:
                yield unit, span

    def load(self, unit: UnitState, part: int, ring: DeviceRing, streams: Streams, *, reference: bool) -> None:
        """Start the transfer of a part of `unit` to `ring`: of its weights, or of the reference policy's."""
        if reference and self.reference_file is not None and unit.plan in self.reference_file:
            self.reference_file.load(unit.plan, ring, streams)
        else:
            ring.load(unit.plan.pieces[part], unit.source(reference=reference))

    def keep_loaded_reference(self) -> None:
        """Copy to the reference arenas what is never updated, and hence in no rank's part; all of it to the file."""
        if self.reference_file is not None:
            self.reference_file.keep((unit.plan, unit.weight) for unit in self.units)
        for unit in self.units:
            if unit.reference is not None:
                unit.reference[unit.plan.trained :].copy_(unit.weight[unit.plan.trained :])

    def forget_read_ahead(self) -> None:
        """After a failed pass."""
        if self.reference_file is not None:
            self.reference_file.forget()

    def updates_started(self) -> None:
        """Each rank copies the reference of its part before it writes there; who waits for all of them has it all."""
        if self.parts is not self.units:
            for unit in self.units:
                unit.reference_filled = unit.reference is not None

    def reference_is_kept(self) -> None:
        """The reference arenas hold the weights of the start."""
        for unit in (*self.units, *self.parts):
            unit.reference_filled = unit.reference is not None

    @property
    def grad_dtype(self) -> torch.dtype:
        """Type of the gradient arenas."""
        return next(unit.grad.dtype for unit in self.units if unit.grad is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Release all arenas."""
        self.units = self.parts = []
        if self.reference_file is not None:
            self.reference_file.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def _buffer_bytes(plan: ModelPlan) -> list[int]:
    """Bytes of every buffer of `plan`, each rounded up so that the next one may have any type."""
    buffers = [buffer for unit in plan.units for buffer in unit.buffers]
    return [-(-buffer.shape.numel() * buffer.dtype.itemsize // 8) * 8 for buffer in buffers]

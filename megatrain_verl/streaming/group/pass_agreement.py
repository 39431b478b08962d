"""What the ranks agree on at the start of a training pass, so that they can read its weights together.

Which units a pass reads, and when, follows from its waves, from the slots that hold units, from the kept layers and
from what is in the slots at its start. Of slots and kept layers each takes as many as the rank that has room for the
fewest. Ranks that differ in the rest read in full in that pass, as they do in passes without gradients: those are not
always made by all ranks.
"""

import zlib

from torch import Tensor

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.device_ring import DeviceRing
from megatrain_verl.streaming.group.group import Group
from megatrain_verl.streaming.group.read_choice import choose_reads
from megatrain_verl.streaming.group.shared_reads import SharedReads
from megatrain_verl.streaming.host_store import ParameterState
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner
from megatrain_verl.streaming.streams import Streams


class PassAgreement:
    """Plans training passes with the other ranks of `group`; every rank makes it.

    `choice` is how weights are read where the ranks agree; `reads` reads them in this pass, None if they do not.
    """

    def __init__(
        self, group: Group, config: StreamingConfig, streams: Streams, state: ParameterState, device: str
    ) -> None:
        self._group, self._config = group, config
        largest = max((unit.weight for unit in state.units), key=Tensor.numel)
        with group.told():
            self.choice = choose_reads(group, streams, largest, device)
        self._shared = self.choice.reads
        self.reads: SharedReads | None = None

    def plan(
        self, planner: PassPlanner, micro_batches: list[MicroBatch], ring: DeviceRing | None, own_bytes: int
    ) -> tuple[PassPlan, bool]:
        """The plan of the next pass, and whether the slots of `ring` can stay, which ranks that read together agree on.

        Raises:
            ValueError: see `PassPlanner.plan`.
            RuntimeError: the ranks have not read the same units together.
        """
        plan = planner.plan(micro_batches, own_bytes)
        slots = 0 if ring is None else len(ring.layer_slots)
        if self._shared is None:
            return plan, slots in (0, plan.layer_slots)
        order, held = _digest(self._order(plan, micro_batches)), _digest([] if ring is None else ring.held())
        own = [self._shared.history, order, held, slots, plan.layer_slots, plan.kept_layers]
        histories, orders, helds, *counts = zip(*self._group.gather(own, "the plan of a step"), strict=True)
        if len(set(histories)) > 1:
            raise RuntimeError("the ranks have not read the same weights together; what they computed is wrong")
        slots, layer_slots, kept_layers = ([int(count) for count in each] for each in counts)
        self.reads = self._shared if len(set(orders)) == 1 else None
        if self.reads is not None:
            layer_slots = [min(layer_slots)] * len(layer_slots)
            plan = planner.lowered(plan, micro_batches, layer_slots[0], min(kept_layers))
            if ring is not None and len(set(helds)) > 1:
                ring.forget()
        return plan, all(has in (0, wanted) for has, wanted in zip(slots, layer_slots, strict=True))

    def close(self) -> None:
        """Release what reads together. No rank may be in a pass."""
        if self._shared is not None:
            self._shared.close()

    def _order(self, plan: PassPlan, micro_batches: list[MicroBatch]) -> tuple[object, ...]:
        """What decides about the order of reads and of the gradients between them, beside slots and kept layers."""
        images = [any(batch.images is not None for batch in wave) for wave in plan.split(micro_batches)]
        return images, plan.resident_gradients, self._config.checkpoint_interval, self._config.most_resident_layers == 0


def _digest(value: object) -> int:
    return zlib.crc32(repr(value).encode())

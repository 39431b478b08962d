"""The memory of the device slots goes when they are released, and what is free then decides about the next ones."""

import gc

import pytest

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.pass_plan import PassPlan
from tests import oracle

FEW, MANY = PassPlan((2,)), PassPlan((2,), layer_slots=4)


class RecordingPlanner(oracle.FixedPlanner):
    """Gives the plans of a list in turn; notes the bytes that were the engine's own, and whether old slots lived."""

    def __init__(self, plans, slots):
        super().__init__(plans[0])
        self._plans, self._slots, self.own_bytes, self.alive = plans, slots, [], []

    def plan(self, micro_batches, own_bytes):
        self.own_bytes.append(own_bytes)
        self.alive.append(any(not storage.expired() for storage in self._slots))
        return self._plans[len(self.own_bytes) - 1]


@pytest.fixture
def no_collection():
    """Python's own garbage collection comes at some time; here it would hide what keeps memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def engine_after_a_pass():
    config = oracle.tiny_config("qwen2", layers=4)
    engine = oracle.make_engine(oracle.plain_model(config), config, AdamWConfig(lr=1e-3))
    step(engine)
    return engine


def step(engine):
    batches = oracle.split_micro_batches(oracle.random_rows([9, 14]), 1)
    engine.zero_grad()
    engine.forward_backward(batches, lambda m, scores: -scores.log_probs.sum() / 20)
    engine.optimizer_step()


class InCycle:
    """What the garbage collector alone can free, with a view into the slots: a module that torch.compile has seen."""

    def __init__(self, view):
        self.view, self.itself = view, self


@pytest.mark.parametrize("cycle", [False, True])
def test_released_slots_are_freed_at_once_though_a_cycle_has_a_view_of_them(no_collection, cycle):
    engine = engine_after_a_pass()
    slots = engine._ring.storages()
    assert len(slots) > 2 and not any(storage.expired() for storage in slots)
    if cycle:
        InCycle(engine._ring.head_weight[:3])
    engine.release_device()
    assert all(storage.expired() for storage in slots)
    engine.close()


def test_another_number_of_slots_is_planned_again_with_the_old_ones_freed(no_collection):
    engine = engine_after_a_pass()
    slots = engine._ring.storages()
    engine.planner = planner = RecordingPlanner([MANY, FEW, MANY], slots)
    step(engine)
    assert planner.alive == [True, False]  # the second plan counts with the memory of the first slots
    assert planner.own_bytes[0] > 0 and planner.own_bytes[1] == 0
    assert len(engine._ring.layer_slots) == FEW.layer_slots  # what was found then holds
    engine.close()

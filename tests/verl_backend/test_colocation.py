"""What the engine leaves of the device to the rollout, and that weights reach it while AdamW goes on."""

import threading
from collections.abc import Callable

import pytest
from verl.workers.config import HFModelConfig

from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep
from tests.verl_backend.cases import actor_loss, rl_batch, same, train, weights


def test_adamw_on_the_device_goes_on_until_the_weights_are_sent(tiny: HFModelConfig, make: Callable) -> None:
    host, shared = (make(tiny, optimizer_backend="native", device_adamw=shared) for shared in (False, True))
    batch = rl_batch(tiny.hf_config.vocab_size)
    for engine in (host, shared):
        train(engine, batch, actor_loss())
        assert engine.streaming._ring is None
    assert same(weights(shared), weights(host))
    assert host.streaming._device_bytes() == 0 < shared.streaming._device_bytes()
    shared.to("cpu", model=True, optimizer=False, grad=False)
    assert shared.streaming._device_bytes() == 0
    shared.to("cpu", model=True, optimizer=False, grad=False)  # verl may ask again


def test_each_weight_is_sent_as_soon_as_its_unit_is_updated(
    tiny: HFModelConfig, make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding leaves while the units behind it still wait for AdamW."""
    engine = make(tiny)
    update, sent = engine.streaming._updates._adamw.update, threading.Event()
    first, *others = engine.streaming.state.units

    def held(unit: UnitState, step: AdamWStep) -> None:
        if unit is not first:
            assert sent.wait(timeout=20), "the first unit's weights were not sent before the next unit's AdamW"
        update(unit, step)

    monkeypatch.setattr(engine.streaming._updates._adamw, "update", held)
    before = weights(engine)
    train(engine, rl_batch(tiny.hf_config.vocab_size), actor_loss())
    exported = engine.get_per_tensor_param()[0]
    name, weight = next(exported)
    assert weight.data_ptr() == first.view(first.weight, first.plan.spans[0]).data_ptr()  # in place, no copy
    assert not weight.equal(before[name])
    sent.set()
    names = [name, *(name for name, _ in exported)]
    assert names == [span.name for unit in (first, *others) for span in unit.plan.spans]

"""What the engine leaves of the device to the rollout, and that weights reach it while AdamW goes on."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from verl.workers.config import HFModelConfig
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

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


def receive(handle: str, received: dict[str, Tensor], on_bucket: Callable[[], None]) -> threading.Thread:
    """What vLLM's worker does, in a thread: verl's receiver copies each bucket to `received`."""

    def take(weights: list[tuple[str, Tensor]], is_last: bool) -> None:
        received.update((name, weight.clone()) for name, weight in weights)
        on_bucket()

    receiver = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    thread = threading.Thread(target=receiver.receive_weights, args=(take,), daemon=True)
    thread.start()
    return thread


def test_verls_sender_fills_a_bucket_while_adamw_goes_on(
    tiny: HFModelConfig, make: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first bucket is with the receiver before the last unit is updated: nobody collects all weights first."""
    engine = make(tiny)
    update, arrived = engine.streaming._updates._adamw.update, threading.Event()
    last = engine.streaming.state.units[-1]

    def held(unit: UnitState, step: AdamWStep) -> None:
        if unit is last:
            assert arrived.wait(timeout=20), "no weights were received before the last unit's AdamW"
        update(unit, step)

    monkeypatch.setattr(engine.streaming._updates._adamw, "update", held)
    train(engine, rl_batch(tiny.hf_config.vocab_size), actor_loss())
    handle, received = f"ipc://{tmp_path}/weights", {}
    receiver = receive(handle, received, arrived.set)
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    sender.bucket_size = max(4 * span.numel for unit in engine.streaming.plan.units for span in unit.spans)
    asyncio.run(sender.async_send_weights(engine.get_per_tensor_param()[0]))
    receiver.join(timeout=20)
    assert same(received, weights(engine))


def test_a_weight_larger_than_the_bucket_is_sent_from_the_device(tiny: HFModelConfig, make: Callable) -> None:
    """verl sends it by the handle of its memory, which a view of an arena cannot give: it must be a copy on the device.

    On the CPU platform the "device" is the host, so that the copy is no copy; tests/gpu has the transfer itself.
    """
    engine = make(tiny, update_weights_bucket_megabytes=0)
    moved: list[torch.Size] = []
    to = Tensor.to

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", lambda weight, *args: (moved.append(weight.shape), to(weight, *args))[1])
        exported = weights(engine)
    assert moved == [weight.shape for weight in exported.values()]

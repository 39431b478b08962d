"""The optimizer step: lazy per unit, frozen settings, errors, non-finite gradients, gradients of several calls."""

import threading
import time

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.streams import DeviceStreams
from tests import oracle


def mean_loss(tokens):
    return lambda index, scores: -scores.log_probs.sum() / tokens


@pytest.fixture
def setup():
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    engines = []

    def make(**settings):
        engines.append(oracle.make_engine(model, config, AdamWConfig(lr=1e-2), **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def backward(engine, seed=0, lengths=(9, 14)):
    rows = oracle.random_rows(list(lengths), seed=seed)
    engine.forward_backward([oracle.pack(rows)], mean_loss(sum(lengths)))


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in right)


class HeldAdamW:
    """The engine's own AdamW, held back until released."""

    def __init__(self, adamw):
        self.adamw, self.released, self.updated = adamw, threading.Event(), []

    def update(self, unit, step):
        self.released.wait(10)
        self.updated.append(unit.plan.name)
        self.adamw.update(unit, step)

    def close(self):
        self.adamw.close()


def test_a_step_only_starts_the_update_and_a_unit_is_waited_for_alone(setup):
    engine = setup()
    backward(engine)
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    held = engine._updates._adamw = HeldAdamW(engine._updates._adamw)
    engine.optimizer_step()
    assert held.updated == []  # returned before any unit was updated
    held.released.set()
    name, weight = next(engine.named_weights())
    assert not torch.equal(weight, before[name])
    list(engine.named_weights())
    assert held.updated == [unit.plan.name for unit in engine.state.units]  # in forward order


def test_settings_of_a_step_are_those_of_its_call(setup):
    engine, control = setup(), setup()
    for each in (engine, control):
        backward(each)
    held = engine._updates._adamw = HeldAdamW(engine._updates._adamw)
    engine.optimizer_step(lr=3e-3)
    engine._adamw_config.lr, engine._adamw_config.weight_decay = 1.0, 1.0
    engine.zero_grad()  # must not touch the gradients that the held update still reads
    held.released.set()
    control._adamw_config = control._updates._settings = AdamWConfig(lr=1e-2)
    control.optimizer_step(lr=3e-3)
    assert same(oracle.masters(engine), oracle.masters(control))


def test_an_error_in_the_optimizer_thread_names_its_unit_at_the_next_wait(setup):
    engine = setup()
    backward(engine)
    engine._layers_grad = engine.state.units[2].grad
    engine.state.units[2].grad = engine.state.units[2].grad[:-1]  # the update of layers.1 cannot work
    engine.optimizer_step()
    for attempt in (lambda: list(engine.named_weights()), lambda: backward(engine)):
        with pytest.raises(RuntimeError, match=r"AdamW of layers\.1 failed in step 1"):
            attempt()


@pytest.mark.parametrize("settings", [{}, {"wave_tokens": 14, "dtype": "bfloat16"}], ids=["calls", "waves"])
def test_an_error_in_the_adder_thread_is_raised_at_the_next_wait(settings):
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(oracle.plain_model(config), config, AdamWConfig(lr=1e-2), **settings)
    before = {name: weight.clone() for name, weight in oracle.masters(engine).items()}
    engine.streams.adder.run(lambda: torch.zeros(2).add_(torch.zeros(3)))
    rows = oracle.random_rows([9, 14])
    for _ in range(2):  # an engine that cannot add never goes on as if it had
        with pytest.raises(RuntimeError, match="gradient adder thread failed: The size of tensor"):
            if not settings:
                backward(engine)  # the next call adds to its gradients
            engine.forward_backward(oracle.split_micro_batches(rows, 1), mean_loss(23))
            engine.optimizer_step()
    assert engine.step_count == 0 and same(oracle.masters(engine), before)
    assert engine._device_bytes() == 0  # the failed passes have released everything
    engine.close()


def test_a_nan_gradient_changes_nothing_and_is_not_counted(setup):
    engine, control = setup(), setup()
    for each in (engine, control):
        backward(each)
        each.optimizer_step()
    state = {name: weight.clone() for name, weight in oracle.masters(engine).items()}
    moments = [unit.exp_avg.clone() for unit in engine.state.units]
    engine.zero_grad()
    rows = oracle.random_rows([9])
    engine.forward_backward([oracle.pack(rows)], lambda index, scores: scores.log_probs.sum() * float("nan"))
    norm = engine.optimizer_step()
    assert norm != norm and engine.step_count == 1
    assert same(oracle.masters(engine), state)
    assert all(torch.equal(unit.exp_avg, m) for unit, m in zip(engine.state.units, moments, strict=True))
    for each in (engine, control):
        each.zero_grad()
        backward(each, seed=1)
        each.optimizer_step()
    assert same(oracle.masters(engine), oracle.masters(control))


def test_calls_without_zeroing_add_their_gradients(setup):
    once, twice = setup(), setup(num_grad_slabs=2)
    rows = oracle.random_rows([9, 14, 6])
    loss = mean_loss(26)
    once.forward_backward(oracle.split_micro_batches(rows, 1), loss)
    for row in rows:
        twice.forward_backward([oracle.pack([row])], loss)
    expected = oracle.engine_gradients(once)
    for name, grad in oracle.engine_gradients(twice).items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-5)
    assert twice.optimizer_step() == pytest.approx(once.optimizer_step(), rel=1e-6)


def test_a_full_slab_pool_blocks_and_never_overwrites(setup):
    """The adder is slow, the slabs few: every gradient still arrives."""
    once, twice = setup(), setup(num_grad_slabs=1)
    rows = oracle.random_rows([9, 14])
    once.forward_backward(oracle.split_micro_batches(rows, 1), mean_loss(21))
    twice.forward_backward([oracle.pack(rows[:1])], mean_loss(21))
    run = twice.streams.adder.run

    def run_slowly(work):
        run(lambda: time.sleep(0.02))
        run(work)

    twice.streams.adder.run = run_slowly
    twice.forward_backward([oracle.pack(rows[1:])], mean_loss(21))
    expected = oracle.engine_gradients(once)
    for name, grad in oracle.engine_gradients(twice).items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-5)


def test_adding_bfloat16_gradients_is_refused_with_the_remedy(setup):
    engine = setup(dtype="bfloat16")
    backward(engine)
    expected = [unit.grad.clone() for unit in engine.state.units]
    sent = engine.counters.h2d_bytes
    with pytest.raises(ValueError, match="grad_dtype=float32"):
        backward(engine)
    assert engine.counters.h2d_bytes == sent  # refused before any work, and nothing is lost
    assert all(torch.equal(unit.grad, grad) for unit, grad in zip(engine.state.units, expected, strict=True))
    assert engine.optimizer_step() > 0


def test_a_step_without_gradients_is_refused(setup):
    engine = setup()
    with pytest.raises(ValueError, match="no gradients"):
        engine.optimizer_step()
    backward(engine)
    engine.optimizer_step()
    engine.zero_grad()
    before = oracle.masters(engine)
    with pytest.raises(ValueError, match="no gradients"):
        engine.optimizer_step()
    assert same(oracle.masters(engine), before)


def test_first_update_on_policy_has_ratio_one_whatever_the_micro_batches(setup):
    engine = setup()
    rows = oracle.random_rows([9, 14, 6, 11])
    old = engine.forward(oracle.split_micro_batches(rows, 1))
    together = oracle.split_micro_batches(rows, 4)
    new = engine.forward_backward(together, mean_loss(36))
    old = oracle.engine_log_probs(old, oracle.split_micro_batches(rows, 1))
    for before, after in zip(old, oracle.engine_log_probs(new, together), strict=True):
        torch.testing.assert_close((after - before).exp(), torch.ones_like(after), atol=1e-5, rtol=0)


def test_moves_too_small_for_bfloat16_are_kept_in_the_low_half(setup):
    engine = setup(dtype="bfloat16")
    start = [(unit.master(), unit.weight.clone()) for unit in engine.state.units]
    backward(engine)
    engine.optimizer_step(lr=1e-6)
    oracle.masters(engine)  # waits
    for unit, (master, high) in zip(engine.state.units[1:-1], start[1:-1], strict=True):  # the decoder layers
        parameters = sum(span.numel for span in unit.plan.spans)
        assert (unit.master() != master).sum() > 0.99 * parameters
        assert (unit.weight != high).sum() < 0.1 * parameters


@pytest.mark.parametrize("tied", [False, True])
def test_exports_without_an_update_are_the_same_bits_each_weight_once(tied):
    config = oracle.tiny_config("qwen2", tied=tied)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, dtype="bfloat16")
    backward(engine)
    engine.optimizer_step()
    first = [(name, weight.clone()) for name, weight in engine.named_weights()]
    engine.forward([oracle.pack(oracle.random_rows([9]))])
    engine.release_device()
    second = list(engine.named_weights())
    assert [name for name, _ in first] == [name for name, _ in second]
    assert sorted(name for name, _ in first) == sorted(name for name, _ in model.named_parameters())
    for (_, before), (_, after) in zip(first, second, strict=True):
        assert torch.equal(before, after) and after.isfinite().all() and after.dtype is torch.bfloat16
    engine.close()


def test_tied_matrix_is_one_parameter_and_stays_tied():
    config = oracle.tiny_config("qwen2", tied=True)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config)
    names = [name for name, _ in engine.named_weights()]
    assert names.count("model.embed_tokens.weight") == 1 and "lm_head.weight" not in names
    assert engine.plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    for step in range(3):
        engine.zero_grad()
        backward(engine, seed=step)
        engine.optimizer_step()
    reloaded = oracle.plain_model(config)
    reloaded.load_state_dict(dict(engine.named_weights()), strict=False)
    row = oracle.random_rows([12])[0]
    batch = oracle.pack([row])
    with torch.no_grad():
        expected = oracle.plain_log_probs(reloaded, row)[0]
    torch.testing.assert_close(oracle.engine_log_probs(engine.forward([batch]), [batch])[0], expected)
    engine.close()


def test_reference_weights_are_those_first_loaded_without_a_copy_on_the_swap(setup):
    engine = setup(keep_reference=True)
    batch = oracle.pack(oracle.random_rows([12]))
    first = engine.forward([batch])[0].log_probs
    for step in range(2):
        engine.zero_grad()
        backward(engine, seed=step)
        engine.optimizer_step()
    kept = [unit.reference.clone() for unit in engine.state.units]
    sent = engine.counters.h2d_bytes
    engine.forward([batch])
    per_pass = engine.counters.h2d_bytes - sent
    with engine.reference_weights():
        assert torch.equal(engine.forward([batch])[0].log_probs, first)
    assert engine.counters.h2d_bytes - sent == 2 * per_pass  # nothing but the pass itself
    assert all(torch.equal(unit.reference, k) for unit, k in zip(engine.state.units, kept, strict=True))
    assert not torch.equal(engine.forward([batch])[0].log_probs, first)


def test_a_failing_loss_leaves_the_engine_usable(setup):
    engine, control = setup(), setup()
    with pytest.raises(ZeroDivisionError):
        engine.forward_backward([oracle.pack(oracle.random_rows([9]))], lambda index, scores: 1 / 0)
    for each in (engine, control):
        each.zero_grad()
        backward(each)
        each.optimizer_step()
    assert same(oracle.masters(engine), oracle.masters(control))


@pytest.mark.parametrize("breaks", ["abandon", "grad", "adder", "optimizer"])
def test_a_queue_that_breaks_with_a_pass_hides_no_error_and_keeps_nothing(breaks, monkeypatch, caplog):
    config = oracle.tiny_config("qwen2")
    settings = {"grad_dtype": "float32", "device_adamw": True, "optimizer_backend": "native"}
    engine = oracle.make_engine(oracle.plain_model(config), config, **settings)
    backward(engine)
    engine.optimizer_step()
    engine.zero_grad()
    backward(engine)
    assert engine._device_bytes() > 0
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        name, broken = {"abandon": ("abandon", None)}.get(breaks, ("record", getattr(engine.streams, breaks)))
        # A RuntimeError, as CUDA's are. Of a thread it comes out of whatever waits for the thread.
        patch.setattr(broken or engine.streams, name, lambda: torch.empty(2).view(3))
        patch.setattr(engine._gradients, "finish", lambda *_: 1 / 0)
        engine.forward_backward([oracle.pack(oracle.random_rows([9]))], mean_loss(9))
    assert "while a failed pass is cleared away: shape" in caplog.text
    assert engine._device_bytes() == 0 and not engine._gradients.pending
    engine.close()


def test_a_failed_pass_waits_for_every_queue():
    streams, sent = DeviceStreams("cpu"), []
    streams.adder.run(lambda: 1 / 0)
    streams.reader.run(lambda: time.sleep(0.2) or sent.append(1))
    with pytest.raises(RuntimeError, match="gradient adder thread failed: division"):
        streams.abandon()
    assert sent == [1]
    streams.close()


@pytest.mark.timeout(60)
def test_an_engine_may_be_closed_again():
    """With AdamW on the device too, which would be waited for in queues that have ended."""
    config = oracle.tiny_config("qwen2")
    settings = {"device_adamw": True, "optimizer_backend": "native"}
    engine = oracle.make_engine(oracle.plain_model(config), config, **settings)
    backward(engine)
    engine.optimizer_step()
    for _ in range(2):
        engine.close()
        assert engine.closed and engine.state.nbytes == 0

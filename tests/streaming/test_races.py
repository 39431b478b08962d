"""The schedule on simulated streams: every order that the waits allow gives the same bits, and every wait is needed."""

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.simulated_streams import SimulatedStreams
from tests import oracle

ORDERS = 25


@pytest.fixture(autouse=True)
def one_thread():
    """The work is tiny; threads that wait for each other would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(streams, *, layers=4, **settings):
    """Two steps of one call, one of two calls (gradients added on the host), then scores; returns all results."""
    config = oracle.tiny_config("qwen2", layers=layers, tied=settings.pop("tied", False))
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, AdamWConfig(lr=1e-2), streams=streams, num_grad_slabs=2, **settings)
    rows = oracle.random_rows([6, 9, 4, 8, 3])
    batches = oracle.split_micro_batches(rows, 2)
    results = []
    for calls in (1, 1, 2):
        engine.zero_grad()
        for _ in range(calls):
            outputs = engine.forward_backward(batches, lambda m, scores: -scores.log_probs.sum() / 16)
            results += [output.log_probs.clone() for output in outputs]
        results.append(torch.tensor(engine.optimizer_step(), dtype=torch.float64))
    results += [weight.clone() for _, weight in engine.named_weights()]
    results += [output.log_probs.clone() for output in engine.forward(batches)]
    engine.forward_backward(batches, lambda m, scores: -scores.log_probs.sum() / 16)
    engine.release_device()
    results.append(torch.tensor(streams is None or streams.idle()))
    engine.close()
    return results


def same_bits(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


SPILL = {"device_activation_gb": 0}
MODELS = [
    {},
    {"layers": 2},
    {"tied": True},
    {"checkpoint_interval": 2},
    {"tied": True, "checkpoint_interval": 3},
    SPILL,
    {"checkpoint_interval": 2, "wave_tokens": 20, **SPILL},
]


@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_every_allowed_order_gives_the_same_bits(settings):
    expected = train(None, **settings)  # the CPU's inline streams and threads
    for seed in range(8):
        assert same_bits(train(SimulatedStreams(seed), **settings), expected), f"order {seed}"


def test_every_wait_is_needed():
    """Some waits follow from others in most models, and are needed in some: several take part."""
    models = [{}, {"layers": 2}, {"tied": True}, SPILL, {"layers": 2, "wave_tokens": 15, **SPILL}]
    expected = [train(None, **model) for model in models]
    reasons = set()
    for model in models:
        streams = SimulatedStreams(0)
        train(streams, **model)
        reasons |= streams.waits
    assert len(reasons) == 27, sorted(reasons)
    for reason in sorted(reasons):
        orders = ((seed, index) for seed in range(ORDERS) for index in range(len(models)))
        found = any(goes_wrong(seed, reason, models[index], expected[index]) for seed, index in orders)
        assert found, f"nothing goes wrong without this wait: {reason}"


def goes_wrong(seed, reason, model, expected):
    """Whether leaving out the waits of one reason changes a result, or lets work find its input missing."""
    try:
        return not same_bits(train(SimulatedStreams(seed, drop=reason), **model), expected)
    except (RuntimeError, KeyError, IndexError, TypeError, AttributeError, ValueError):
        return True


def test_streams_that_wait_for_each_other_are_reported():
    streams = SimulatedStreams(0)
    behind_compute = SimulatedStreams(0).compute.record()  # a mark of another run: never reached here
    streams.weight.wait(behind_compute, "never")
    with pytest.raises(RuntimeError, match="wait for each other"):
        streams.host_wait(streams.weight.record(), "blocked")

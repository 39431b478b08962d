"""The schedule on simulated streams: every order that the waits allow gives the same bits, and every wait is needed."""

import tempfile

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming import device_adamw
from megatrain_verl.streaming.pass_plan import PassPlan
from megatrain_verl.streaming.simulated_streams import SimulatedStreams
from tests import oracle
from tests.families.configs import family_config

ORDERS = 25


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch):
    monkeypatch.setattr(device_adamw, "CHUNK_ELEMENTS", 512)


def train(streams, *, layers=4, **settings):
    """Steps, scores, saving, loading, releasing the device; returns all that is computed."""
    if settings.get("expert_parts"):
        config = family_config("Mixtral-8x7B", num_hidden_layers=layers, num_local_experts=3, hidden_size=16)
    else:
        config = oracle.tiny_config("qwen2", layers=layers, tied=settings.pop("tied", False))
    model = oracle.plain_model(config)
    ahead = "speculative_adamw_gb" in settings  # never clipped then, so that updates ahead are used
    adamw = AdamWConfig(lr=1e-2, clip_grad=None if ahead else 1.0)
    plan = settings.pop("plan", None)
    settings["keep_reference"] = "reference_folder" in settings
    engine = oracle.make_engine(model, config, adamw, streams=streams, num_grad_slabs=2, **settings)
    if plan is not None:
        engine.planner = oracle.FixedPlanner(plan)
    rows = oracle.random_rows([6, 9, 4, 8, 3])
    batches = oracle.split_micro_batches(rows, 2)
    results = []

    def backward(calls=1):
        engine.zero_grad()
        for _ in range(calls):
            outputs = engine.forward_backward(
                batches, lambda m, scores: -scores.log_probs.sum() / 16, next_lr=1e-2 if ahead else None
            )
            results.extend(output.log_probs.clone() for output in outputs)

    def step():
        results.append(torch.tensor(engine.optimizer_step(), dtype=torch.float64))

    for calls in (1, 1, 2):  # the last adds gradients on the host
        backward(calls)
        step()
    results += [weight.clone() for _, weight in engine.named_weights()]
    results += [output.log_probs.clone() for output in engine.forward(batches)]
    if settings["keep_reference"]:
        with engine.reference_weights():
            results += [output.log_probs.clone() for _ in range(2) for output in engine.forward(batches)]
    with tempfile.TemporaryDirectory() as folder:
        backward()
        step()
        engine.save(f"{folder}/state")
        backward()
        step()
        engine.load(f"{folder}/state")
    results += [unit.master() for unit in engine.state.units]
    backward()
    step()
    engine.load_weights(model.state_dict().items())
    results += [unit.master() for unit in engine.state.units]
    for calls in (1, 2):
        backward(calls)
        engine.release_device()
        results.append(torch.tensor(streams is None or streams.idle()))
    step()
    engine.release_device()
    results += [weight.clone() for _, weight in engine.named_weights()]
    results.append(torch.tensor(engine._updates.device_bytes))
    engine.close()
    return results


def same_bits(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


RESIDENT = {"plan": PassPlan((2, 1), layer_slots=4, kept_layers=1, resident_gradients=True)}
AHEAD = {"speculative_adamw_gb": 1.0}
SHARED = {"device_adamw": True, "optimizer_backend": "native"}
SPILL = {"device_activation_gb": 0}
COMPACT = {"layers": 2, "resident_layers": 0}
PARTS = {"layers": 2, "expert_parts": 3}
IN_FILE = {"reference_folder": "."}  # nothing is left there
MODELS = [
    {},
    {"layers": 2},
    {"tied": True},
    {"checkpoint_interval": 2},
    {"tied": True, "checkpoint_interval": 3},
    SPILL,
    {"checkpoint_interval": 2, "wave_tokens": 20, **SPILL},
    {"plan": PassPlan((3,), layer_slots=3, kept_layers=3, keep_logit_gradients=True)},
    RESIDENT,
    AHEAD,
    SHARED,
    COMPACT,
    PARTS,
    IN_FILE,
    pytest.param({"expert_parts": 2, **SPILL, **AHEAD}, marks=pytest.mark.slow),
    {"tied": True, **RESIDENT, **AHEAD, **SHARED},
]


@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_every_allowed_order_gives_the_same_bits(settings):
    expected = train(None, **settings)  # the CPU's inline streams and threads
    for seed in range(8):
        assert same_bits(train(SimulatedStreams(seed), **settings), expected), f"order {seed}"


def test_every_wait_is_needed():
    """Some waits follow from others in most models, and are needed in some: several take part."""
    models = [
        {},
        {"layers": 2},
        {"tied": True},
        SPILL,
        {"layers": 2, "wave_tokens": 15, **SPILL},
        RESIDENT,
        AHEAD,
        SHARED,
        COMPACT,
        PARTS,
        IN_FILE,
    ]
    expected = [train(None, **model) for model in models]
    waits = []
    for model in models:
        streams = SimulatedStreams(0)
        train(streams, **model)
        waits.append(streams.waits)
    reasons = set().union(*waits)
    assert len(reasons) == 53, sorted(reasons)
    for reason in sorted(reasons):
        orders = ((seed, index) for seed in range(ORDERS) for index in range(len(models)) if reason in waits[index])
        found = any(goes_wrong(seed, reason, models[index], expected[index]) for seed, index in orders)
        assert found, f"nothing goes wrong without this wait: {reason}"


def goes_wrong(seed, reason, model, expected):
    """Whether leaving out the waits of one reason changes a result, or lets work find its input missing."""
    try:
        return not same_bits(train(SimulatedStreams(seed, drop=reason), **model), expected)
    except (RuntimeError, KeyError, IndexError, TypeError, AttributeError, ValueError):
        return True


@pytest.mark.parametrize("seed", range(6))
def test_a_failing_loss_leaves_nothing_behind(seed):
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    engine, control = (oracle.make_engine(model, config, streams=SimulatedStreams(seed)) for _ in range(2))
    batches = oracle.split_micro_batches(oracle.random_rows([6, 9, 4]), 1)
    with pytest.raises(ZeroDivisionError):
        engine.forward_backward(batches, lambda m, scores: scores.log_probs.sum() / (1 // (1 - m)))
    for each in (engine, control):
        each.zero_grad()
        each.forward_backward(batches, lambda m, scores: -scores.log_probs.sum() / 16)
        each.optimizer_step()
    expected = oracle.masters(control)
    assert all(torch.equal(weight, expected[name]) for name, weight in oracle.masters(engine).items())


def test_streams_that_wait_for_each_other_are_reported():
    streams = SimulatedStreams(0)
    behind_compute = SimulatedStreams(0).compute.record()  # a mark of another run: never reached here
    streams.weight.wait(behind_compute, "never")
    with pytest.raises(RuntimeError, match="wait for each other"):
        streams.host_wait(streams.weight.record(), "blocked")

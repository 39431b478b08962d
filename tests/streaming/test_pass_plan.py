"""What the planner may choose changes no result; what it chooses fits and is the fastest by its own prediction."""

import pytest
import torch

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming import pass_plan
from megatrain_verl.streaming.device_plan import device_bytes
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner
from tests import oracle

GB = 1e9
PLANS = [
    PassPlan((3,), layer_slots=4),
    PassPlan((3,), layer_slots=3, kept_layers=1),
    PassPlan((3,), kept_layers=4),
    PassPlan((3,), kept_layers=2, keep_logit_gradients=True),
    PassPlan((2, 1), resident_gradients=True),
    PassPlan((1, 1, 1), layer_slots=4, kept_layers=4, resident_gradients=True, keep_logit_gradients=True),
]


def two_steps(model, config, plan, **settings):
    """Scores, gradients, norms and masters of two steps by `plan` (None: the CPU's own)."""
    # Of a gradient of mere rounding AdamW makes a step: a small one stays below what is compared.
    engine = oracle.make_engine(model, config, AdamWConfig(lr=1e-3), **settings)
    if plan is not None:
        engine.planner = oracle.FixedPlanner(plan)
    results = []
    for seed in (1, 2):
        batches = oracle.split_micro_batches(oracle.random_rows([9, 14, 6, 11, 5], seed=seed), 2)
        engine.zero_grad()
        outputs = engine.forward_backward(batches, lambda m, scores: -(m + 1) * scores.log_probs.sum() / 40)
        results += [output.log_probs for output in outputs]
        results += oracle.engine_gradients(engine).values()
        results.append(torch.tensor(engine.optimizer_step()))
    results += oracle.masters(engine).values()
    engine.close()
    return results


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_every_plan_gives_the_numbers_of_plain_streaming(plan, tied):
    config = oracle.tiny_config("qwen2", layers=4, tied=tied)
    model = oracle.plain_model(config)
    streamed = two_steps(model, config, PassPlan((3,)))
    for value, expected in zip(two_steps(model, config, plan), streamed, strict=True):
        assert (value - expected).norm() <= 1e-5 * expected.norm() + 1e-6


@pytest.mark.parametrize("layers", [2, 3])  # the last layer in either slot: a small head covers only the first
def test_embedding_and_head_over_the_layers_give_the_numbers_of_slots_of_their_own(layers):
    """Lean mode: what a slot held is gone when the other one over it is filled."""
    config = oracle.tiny_config("qwen2", layers=layers)
    model = oracle.plain_model(config)
    expected = two_steps(model, config, PassPlan((3,)))
    lean = two_steps(model, config, PassPlan((3,)), resident_layers=0)
    assert all(torch.equal(value, other) for value, other in zip(lean, expected, strict=True))


def test_kept_layers_stop_at_a_segment_boundary_and_draw_the_same_dropout():
    config = oracle.tiny_config("qwen2", layers=5, attention_dropout=0.1)
    model = oracle.plain_model(config, attn_implementation="sdpa")
    expected = two_steps(model, config, PassPlan((3,)))
    for plan in (PassPlan((3,), kept_layers=1), PassPlan((3,), layer_slots=3, kept_layers=3)):
        results = two_steps(model, config, plan, checkpoint_interval=2)
        assert all(torch.equal(value, other) for value, other in zip(results, expected, strict=True))


def test_weights_that_are_still_there_are_not_sent_again():
    config = oracle.tiny_config("qwen2", layers=4)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, AdamWConfig(lr=1e-2), keep_reference=True)
    engine.planner = oracle.FixedPlanner(PassPlan((1, 1), layer_slots=4, resident_gradients=True))
    batches = oracle.split_micro_batches(oracle.random_rows([9, 14]), 1)
    layers = 4 * sum(unit.numel for unit in engine.plan.layers)

    def layer_bytes(work, edges):
        before = engine.counters.h2d_bytes
        work()
        return engine.counters.h2d_bytes - before - 4 * edges * engine.plan.embedding.numel

    def step():
        engine.zero_grad()
        engine.forward_backward(batches, lambda m, scores: -scores.log_probs.sum() / 20)

    edge = engine.plan.embedding.numel + engine.plan.head.numel
    sizes = edge / engine.plan.embedding.numel
    assert layer_bytes(step, 2 * sizes) == layers
    assert layer_bytes(step, 2 * sizes) == 0  # nothing changed
    first = engine.forward(batches)[0].log_probs
    engine.optimizer_step()
    assert layer_bytes(step, 2 * sizes) == layers
    with engine.reference_weights():
        assert layer_bytes(lambda: engine.forward(batches), sizes) == layers
        assert torch.equal(engine.forward(batches)[0].log_probs, first)
    assert not torch.equal(engine.forward(batches)[0].log_probs, first)
    engine.load_weights(model.state_dict().items())
    assert torch.equal(engine.forward(batches)[0].log_probs, first)
    engine.close()


class Shape:
    """Sizes of a 7B Qwen2.5."""

    layer_sizes = (233_057_792,) * 28
    edge_sizes = (545_000_000, 545_000_000)
    trained_layer_sizes, trained_edge_sizes = layer_sizes, edge_sizes
    expert_sizes = trained_expert_sizes = (0,) * 28
    separable_experts = 0
    slot_sizes = trained_slot_sizes = {"edge": 545_000_000}
    tied = False
    active_layer_parameters = sum(layer_sizes)
    hidden_size, intermediate_size, experts_per_token, vocab_size = 3584, 18944, 0, 152064


def choose(monkeypatch, available, rows, **settings):
    monkeypatch.setattr(pass_plan, "available_bytes", lambda own_bytes, utilization: available)
    planner = PassPlanner(Shape, StreamingConfig(**settings), "cuda")
    planner.saved_bytes_per_token = 155 * 1024
    batches = [oracle.pack([torch.zeros(1024, dtype=torch.long)] * 8)] * (rows // 8)
    return planner, planner.plan(batches, 0), [batch.num_tokens for batch in batches]


@pytest.mark.parametrize("available", [12 * GB, 30 * GB, 70 * GB, 141 * GB])
@pytest.mark.parametrize("rows", [8, 32, 128])
def test_the_chosen_plan_fits(monkeypatch, available, rows):
    planner, plan, tokens = choose(monkeypatch, available, rows)
    wave = max(pass_plan.wave_sums(plan, tokens))
    parts = device_bytes(Shape, planner._config, max(tokens), wave, layer_slots=plan.layer_slots,
                         resident_gradients=plan.resident_gradients)  # fmt: skip
    used = sum(parts.values()) + plan.kept_layers * wave * planner.saved_bytes_per_token
    used += min(plan.input_bytes, (28 - plan.kept_layers) * wave * 2 * 3584)
    used += plan.keep_logit_gradients * max(tokens) * 2 * Shape.vocab_size
    assert used <= available


def test_what_fewer_slots_and_kept_layers_leave_free_holds_layer_inputs(monkeypatch):
    planner, plan, tokens = choose(monkeypatch, 70 * GB, 32)
    assert plan.layer_slots > 2 and plan.kept_layers > 1
    batches = [oracle.pack([torch.zeros(1024, dtype=torch.long)] * 8)] * 4
    fewer = planner.lowered(plan, batches, plan.layer_slots - 1, plan.kept_layers - 2)
    assert (fewer.layer_slots, fewer.kept_layers) == (plan.layer_slots - 1, plan.kept_layers - 2)
    wave = max(pass_plan.wave_sums(plan, tokens))
    freed = 2 * 233_057_792 + 2 * wave * planner.saved_bytes_per_token
    assert fewer.input_bytes == pytest.approx(plan.input_bytes + freed)


def test_the_whole_device_runs_in_waves_without_recomputation_and_lean_mode_keeps_nothing(monkeypatch):
    planner, plan, tokens = choose(monkeypatch, 141 * GB, 128)
    assert plan.kept_layers == 28 and plan.resident_gradients and len(plan.waves) > 1
    assert planner.seconds(plan, tokens) < 0.9 * planner.seconds(PassPlan((16,)), tokens)
    _, plan, _ = choose(monkeypatch, 141 * GB, 128, resident_layers=0)
    assert (plan.layer_slots, plan.kept_layers, plan.resident_gradients, plan.waves) == (2, 0, False, (16,))
    _, plan, _ = choose(monkeypatch, 12 * GB, 128)
    assert plan.waves == (16,) and plan.input_bytes < 28 * 131072 * 2 * 3584  # the rest is spilled to the host


def test_waves_that_the_user_asked_for_stay_and_use_resident_gradients_where_they_fit(monkeypatch):
    _, plan, _ = choose(monkeypatch, 141 * GB, 32, wave_tokens=16384)
    assert plan.waves == (2, 2) and plan.resident_gradients
    _, plan, _ = choose(monkeypatch, 20 * GB, 32, wave_tokens=16384)
    assert plan.waves == (2, 2) and not plan.resident_gradients


def test_what_is_available_is_free_and_within_the_share_of_the_device(monkeypatch):
    """A device of 100 units with 30 in use by a sleeping rollout, or none; torch holds 20, of which it uses 12."""

    def available(free, own, utilization):
        figures = {"mem_get_info": (free, 100), "memory_reserved": 20, "memory_allocated": 12}
        for name, value in figures.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        return pass_plan.available_bytes(own, utilization)

    assert available(50, 12, 0.95) == 50 + 8 + 12 - 5  # free, cached by torch, and its own
    assert available(50, 0, 0.95) == 50 + 8 - 5  # what others in the process use is not the engine's
    assert available(80, 12, 0.5) == 50 and available(80, 4, 0.5) == 50 - 8

"""Experts streamed in parts: the numbers of plain training and of whole layers, transfers, memory, refusals."""

import pytest
import torch
from transformers.models.mixtral import modeling_mixtral

from megatrain_verl.config import AdamWConfig, LoraSettings, StreamingConfig
from megatrain_verl.resources import HostPlan
from megatrain_verl.streaming.device_plan import device_bytes
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle
from tests.families.configs import HYBRID, MIXTURES, family_config
from tests.families.test_experts import WITH_ROUTER_LOSS, plain_router_loss
from tests.families.test_training import check_three_steps
from tests.streaming.test_parity import plain_step

LENGTHS = [11, 24, 5, 17, 9]
COEFFICIENT = 0.5
NAMES = [name for name in (*MIXTURES, *HYBRID) if name not in ("Llama-4-Scout", "Qwen3.5-27B")]
# Rows per micro-batch and parts of eight experts: three are 2, 3 and 3. The rest runs with --full.
QUICK = {
    "Mixtral-8x7B": (3, 3),
    "Qwen3-30B-A3B": (1, 2),
    "DeepSeek-V2-Lite": (3, 3),
    "DeepSeek-V3": (1, 2),
    "GPT-OSS-20B": (3, 3),
}
CASES = [
    pytest.param(name, size, parts, marks=() if QUICK.get(name) == (size, parts) else pytest.mark.slow)
    for name in NAMES
    for size, parts in ((1, 2), (3, 3), (3, 8))
]


def router_settings(name):
    """A config's settings for a router loss, where the family has one."""
    return {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT} if name in WITH_ROUTER_LOSS else {}


def weighted_router_loss(model, rows):
    return COEFFICIENT * plain_router_loss(model, rows)


def gradients(model, config, rows, size=3, **settings):
    """Every gradient of one engine pass."""
    engine = oracle.make_engine(model, config, **settings)
    oracle.engine_pass(engine, oracle.split_micro_batches(rows, size))
    results = oracle.engine_gradients(engine)
    engine.close()
    return results


@pytest.mark.parametrize("name, size, parts", CASES)
def test_three_steps_equal_plain_adamw(name, size, parts):
    settings = router_settings(name)
    extra = weighted_router_loss if settings else None
    check_three_steps(name, family_config(name, **settings), size, extra, expert_parts=parts)


def test_parts_without_tokens_have_zero_gradients_and_follow_adamw():
    """Three tokens choose one of eight experts each: at least one of the four pairs of experts gets none."""
    config = family_config("Mixtral-8x7B", num_experts_per_tok=1)
    settings = AdamWConfig(lr=1e-3, weight_decay=0.1, eps=1e-6)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, settings, expert_parts=4)
    optimizer = oracle.plain_adamw(model, settings)
    for step, length in enumerate((40, 3, 3)):
        (row,) = oracle.random_rows([length], seed=step)
        plain_step(model, optimizer, [row], settings.clip_grad)
        oracle.engine_pass(engine, [oracle.pack([row])])
        grad = oracle.engine_gradients(engine)["model.layers.0.mlp.experts.down_proj"]
        engine.optimizer_step()
    assert (grad.view(4, -1).norm(dim=1) == 0).any() and grad.norm() > 0
    for parameter, weight in oracle.masters(engine).items():
        expected = model.get_parameter(parameter).detach()
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5, msg=parameter)
    engine.close()


def test_each_weight_crosses_once_in_either_pass_and_each_gradient_once():
    config = family_config("GPT-OSS-20B")
    model = oracle.plain_model(config)
    whole, split = (oracle.make_engine(model, config, expert_parts=parts) for parts in (1, 3))
    batches = oracle.split_micro_batches(oracle.random_rows(LENGTHS), 1)
    for expected, scores in zip(whole.forward(batches), split.forward(batches), strict=True):
        torch.testing.assert_close(scores.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
    numel, parameters = sum(split.plan.unit_sizes), split.plan.num_parameters
    edges = sum(split.plan.edge_sizes)
    assert 4 * parameters <= split.counters.h2d_bytes <= 4 * numel  # the rest is padding
    split.release_device()
    before = split.counters.h2d_bytes
    split.forward_backward(batches, lambda index, outputs: -outputs.log_probs.sum())
    sent = split.counters.h2d_bytes - before  # embedding and head once; the head's slot lies over the layers'
    assert 4 * (2 * parameters - edges) <= sent <= 4 * (2 * numel - edges)
    assert 4 * parameters <= split.counters.d2h_bytes <= 4 * numel
    whole.close()
    split.close()


def test_slots_and_accumulators_are_those_of_the_plan():
    config = family_config("DeepSeek-V3", hidden_size=128, moe_intermediate_size=64)
    model = oracle.plain_model(config)
    planned = {}
    for parts in (1, 2, 8):
        engine = oracle.make_engine(model, config, expert_parts=parts, resident_layers=0)
        batches = [oracle.pack(oracle.random_rows(LENGTHS))]
        engine.forward_backward(batches, lambda index, outputs: -outputs.log_probs.sum())
        plan = device_bytes(engine.plan, engine.config, 66, 66)
        assert engine._ring.nbytes == pytest.approx(plan["weight slots"], rel=0.01)
        assert engine._gradients.device_bytes == pytest.approx(plan["gradient accumulators"], rel=0.01)
        planned[parts] = plan["weight slots"]
        engine.close()
    assert planned[8] < 0.5 * planned[1]


def test_a_checkpoint_goes_on_with_whole_layers_and_with_parts(tmp_path):
    config = family_config("Mixtral-8x7B")
    model, other = oracle.plain_model(config), oracle.plain_model(config, seed=1)
    engine = oracle.make_engine(model, config, expert_parts=3)
    first, second = ([oracle.pack(oracle.random_rows(LENGTHS, seed=seed))] for seed in (1, 2))
    oracle.engine_pass(engine, first)
    engine.optimizer_step()
    engine.save(tmp_path / "state")
    oracle.engine_pass(engine, second)
    engine.optimizer_step()
    expected = oracle.masters(engine)
    for parts in (3, 1):
        resumed = oracle.make_engine(other, config, expert_parts=parts)
        resumed.load(tmp_path / "state")
        oracle.engine_pass(resumed, second)
        resumed.optimizer_step()
        for name, weight in oracle.masters(resumed).items():
            tolerance = 0 if parts == 3 else 2e-5
            torch.testing.assert_close(weight, expected[name], atol=tolerance, rtol=0, msg=name)
        resumed.close()
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"freeze": ["*.experts.*"]},
        pytest.param({"freeze": ["*.self_attn.*", "*.gate.*", "*norm*"]}, marks=pytest.mark.slow),
        pytest.param({"lora": LoraSettings(2, target_modules=["q_proj", "v_proj"])}, marks=pytest.mark.slow),
        {"wave_tokens": 40},
        pytest.param({"device_activation_gb": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parts_give_the_gradients_of_whole_layers(settings):
    config = family_config("Mixtral-8x7B")
    model, rows = oracle.plain_model(config), oracle.random_rows(LENGTHS)
    expected, found = (gradients(model, config, rows, 2, **settings, expert_parts=parts) for parts in (1, 3))
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["Mixtral-8x7B", "GPT-OSS-20B"])
def test_compiled_dense_parts_give_the_gradients_of_plain_ones(name):
    config = family_config(name, **router_settings(name))
    model, rows = oracle.plain_model(config), oracle.random_rows(LENGTHS)
    expected, found = (gradients(model, config, rows, expert_parts=3, compile_layers=on) for on in (False, True))
    for parameter, grad in found.items():
        torch.testing.assert_close(grad, expected[parameter], atol=1e-6, rtol=1e-3, msg=parameter)


def test_what_cannot_be_streamed_in_parts_is_refused():
    with pytest.raises(ValueError, match="Llama4TextExperts is another kind"):
        plan_model(family_config("Llama-4-Scout"), expert_parts=2)
    with pytest.raises(ValueError, match="Qwen2Model has no experts"):
        plan_model(oracle.tiny_config("qwen2"), expert_parts=2)
    with pytest.raises(ValueError, match="MixtralExperts has 8 experts; set it to 8 at most"):
        plan_model(family_config("Mixtral-8x7B"), expert_parts=9)
    for settings in ({"checkpoint_interval": 2}, {"resident_layers": 1}):
        with pytest.raises(ValueError, match="leave resident_layers and checkpoint_interval out"):
            StreamingConfig(expert_parts=2, **settings)
    plan = plan_model(family_config("Mixtral-8x7B"), expert_parts=2)
    with pytest.raises(ValueError, match="expert_parts=2 works with one GPU, not with 4"):
        HostPlan.of(plan, StreamingConfig(expert_parts=2), trainable=True, reference=False, ranks=4)


@pytest.mark.parametrize(
    "change", [lambda output: 2 * output, lambda output: output.tanh(), lambda output: output + output]
)
def test_a_layer_that_does_not_only_add_what_its_experts_return_is_refused(change, monkeypatch):
    forward = modeling_mixtral.MixtralSparseMoeBlock.forward
    monkeypatch.setattr(modeling_mixtral.MixtralSparseMoeBlock, "forward", lambda *inputs: change(forward(*inputs)))
    with pytest.raises(ValueError, match="MixtralDecoderLayer does more with the output of its experts"):
        plan_model(family_config("Mixtral-8x7B"), expert_parts=2)

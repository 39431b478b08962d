"""LoRA: adapters train as in plain transformers with peft and torch.optim.AdamW, in float32, and the base does not."""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

from megatrain_verl.config import AdamWConfig, LoraSettings, StreamingConfig
from megatrain_verl.resources import HostPlan
from megatrain_verl.streaming.adapters import DOWN, UP
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.host_store import ParameterState
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle
from tests.families.configs import family_config

LENGTHS = [11, 24, 5, 17, 9]
ADAMW = AdamWConfig(lr=1e-3, weight_decay=0.1, eps=1e-6)
LORA = LoraSettings(rank=4, alpha=12)
ATTENTION = LoraSettings(rank=4, alpha=12, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
FAMILIES = {"Qwen2.5-7B": LORA, "Qwen2.5-0.5B": LORA, "Mixtral-8x7B": ATTENTION}  # the second has tied embeddings


def plain_lora(model: nn.Module, lora: LoraSettings) -> peft.PeftModel:
    """`model` with peft's adapters."""
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.target_modules, "bias": "none"}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


def copy_adapters(engine: StreamingEngine, plain: peft.PeftModel) -> None:
    """Let `plain` go on from the engine's adapters."""
    result = peft.set_peft_model_state_dict(plain, {name: value.clone() for name, value in engine.named_adapters()})
    assert not result.unexpected_keys
    ours, theirs = dict(engine.named_adapters()), peft.get_peft_model_state_dict(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def plain_step(plain: peft.PeftModel, optimizer: torch.optim.Optimizer, rows: list[Tensor]) -> tuple:
    """Loss, gradients of the adapters before clipping, and their norm."""
    tokens = sum(len(row) - 1 for row in rows)
    optimizer.zero_grad()
    loss = -torch.cat([oracle.plain_log_probs(plain, row)[0] for row in rows]).sum() / tokens
    loss.backward()
    parameters = plain.get_base_model().named_parameters()
    grads = {name: parameter.grad.clone() for name, parameter in parameters if parameter.requires_grad}
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), ADAMW.clip_grad).item()
    optimizer.step()
    return loss.item(), grads, norm


def train_both(engine: StreamingEngine, plain: peft.PeftModel, size: int, steps: int = 3) -> None:
    """So many equal steps of both."""
    optimizer = oracle.plain_adamw(plain, ADAMW)
    for step in range(steps):
        rows = oracle.random_rows(LENGTHS, seed=step)
        loss, grads, norm = plain_step(plain, optimizer, rows)
        assert oracle.engine_pass(engine, oracle.split_micro_batches(rows, size)) == pytest.approx(loss, rel=1e-5)
        mine = oracle.engine_gradients(engine)
        assert mine.keys() == grads.keys()
        for name, grad in mine.items():
            assert (grad - grads[name]).norm() <= 1e-5 * grads[name].norm() + 1e-7 * norm, name
        assert engine.optimizer_step() == pytest.approx(norm, rel=1e-5)


def log_probs(model: nn.Module) -> Tensor:
    """Of fixed rows."""
    with torch.no_grad():
        return torch.cat([oracle.plain_log_probs(model, row)[0] for row in oracle.random_rows(LENGTHS)])


def engine_log_probs(engine: StreamingEngine) -> Tensor:
    batches = oracle.split_micro_batches(oracle.random_rows(LENGTHS), 3)
    return torch.cat(oracle.engine_log_probs(engine.forward(batches), batches))


@pytest.fixture(scope="module", params=[(name, size) for name in FAMILIES for size in (1, 3)], ids=str)
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[StreamingEngine, peft.PeftModel, nn.Module]]:
    """An engine after three steps that equal peft's, the peft model after them, and the base model."""
    name, size = request.param
    config = family_config(name)
    base = oracle.plain_model(config)
    engine = oracle.make_engine(base, config, ADAMW, lora=FAMILIES[name], keep_reference=True)
    plain = plain_lora(copy.deepcopy(base), FAMILIES[name])
    copy_adapters(engine, plain)
    train_both(engine, plain, size)
    yield engine, plain, base
    engine.close()


def test_adapters_equal_peft_and_the_base_stays(trained: tuple) -> None:
    engine, plain, base = trained
    adapters, frozen = dict(plain.get_base_model().named_parameters()), dict(base.named_parameters())
    for name, weight in oracle.masters(engine).items():
        if name.endswith((DOWN, UP)):
            torch.testing.assert_close(weight, adapters[name].detach(), atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(weight, frozen[name]), name


def test_reference_is_the_model_without_adapters(trained: tuple) -> None:
    engine, plain, _ = trained
    with engine.reference_weights():
        reference = engine_log_probs(engine)
    with plain.disable_adapter():
        torch.testing.assert_close(reference, log_probs(plain), atol=1e-5, rtol=1e-5)
    mine = engine_log_probs(engine)
    torch.testing.assert_close(mine, log_probs(plain), atol=1e-5, rtol=1e-5)
    assert (mine - reference).abs().max() > 1e-3


def test_export_merged_and_as_adapter(trained: tuple, tmp_path: Path) -> None:
    engine, plain, base = trained
    engine.plan.lora.write(tmp_path, dict(engine.named_adapters()), "base")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(log_probs(loaded), engine_log_probs(engine), atol=1e-5, rtol=1e-5)
    expected = loaded.merge_and_unload().state_dict()
    layout = engine.plan.hub
    for name, weight in engine.named_weights():
        place = layout.find(name)
        block = expected[place.parameter].reshape(-1)[place.block.offset :][: place.block.numel]
        torch.testing.assert_close(weight, block.view(place.block.shape), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_run_is_bit_equal(dtype: str, tmp_path: Path) -> None:
    config = oracle.tiny_config("qwen2")
    base = oracle.plain_model(config).bfloat16().float()
    engines = [oracle.make_engine(base, config, ADAMW, lora=LORA, keep_reference=True, dtype=dtype) for _ in range(2)]
    straight, resumed = engines
    reference = engine_log_probs(straight)

    def step(engine: StreamingEngine, seed: int) -> None:
        oracle.engine_pass(engine, oracle.split_micro_batches(oracle.random_rows(LENGTHS, seed=seed), 3))
        engine.optimizer_step()

    step(straight, 0)
    step(straight, 1)
    straight.save(tmp_path / "saved")
    step(straight, 2)
    resumed.load(tmp_path / "saved")
    step(resumed, 2)
    masters = oracle.masters(straight)
    assert all(torch.equal(weight, masters[name]) for name, weight in oracle.masters(resumed).items())
    with resumed.reference_weights():
        assert torch.equal(engine_log_probs(resumed), reference)  # B is zero at the start
    other = oracle.make_engine(base, config, ADAMW, lora=dataclasses.replace(LORA, alpha=1), dtype=dtype)
    with pytest.raises(ValueError, match="LoRA {'rank': 4, 'alpha': 12}, the engine has LoRA .*'alpha': 1}"):
        other.load(tmp_path / "saved")
    for engine in (*engines, other):
        engine.close()


def test_adapters_start_by_peft_s_rule_from_the_seed() -> None:
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(oracle.plain_model(config), config, ADAMW, lora=LORA, seed=5)
    start = dict(engine.named_adapters())
    layer = plain_lora(oracle.plain_model(config), LORA).get_base_model().model.layers[0].self_attn.q_proj
    torch.manual_seed(5)
    layer.reset_lora_parameters("default", True)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert next(iter(start)) == first and torch.equal(start[first], layer.lora_A["default"].weight)
    assert all(not value.any() for name, value in start.items() if "lora_B" in name)
    engine.close()


def test_host_plan_has_no_second_copy_and_two_bytes_for_the_base() -> None:
    config = StreamingConfig()
    plan = plan_model(oracle.tiny_config("qwen2"), lora=LORA)
    state = ParameterState.allocate(plan, config, trainable=True, reference=False, register=False)
    host_plan = HostPlan.of(plan, config, trainable=True, reference=False)
    assert host_plan.total - host_plan.bytes_by_kind["staging"] == state.nbytes
    trained = sum(plan.trained_sizes)
    assert state.nbytes == 2 * sum(plan.unit_sizes) + 12 * trained and 0 < trained < sum(plan.unit_sizes) / 2
    state.close()
    settings = {"keep_reference": True, "lora": LORA}
    engine = oracle.make_engine(oracle.plain_model(plan.config), oracle.tiny_config("qwen2"), ADAMW, **settings)
    assert "reference" not in engine.host_plan.bytes_by_kind
    assert all(unit.reference is None for unit in engine.state.units)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "freeze", "message"),
    [
        ({"target_modules": ["lm_head"]}, [], "output matrix lm_head"),
        ({"target_modules": ["embed_tokens"]}, [], "model.embed_tokens, which is no linear layer"),
        ({"target_modules": ["nothing"]}, [], "nothing"),
        ({}, ["*.mlp.*"], "LoRA freezes all but its adapters"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(settings: dict, freeze: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_model(oracle.tiny_config("qwen2"), freeze, LoraSettings(rank=4, **settings))
    with pytest.raises(ValueError, match="lora_rank must be a whole number >= 1, got 0"):
        LoraSettings(rank=0)


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Llama-4-Scout"])
def test_all_linear_of_a_mixture_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="experts and routers .* name linear layers"):
        plan_model(family_config(name), lora=LORA)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow  # compiles for half a minute
def test_compiled_layers_train_and_switch_adapters_off() -> None:
    config = family_config("Qwen2.5-7B")
    base = oracle.plain_model(config)
    engine = oracle.make_engine(base, config, ADAMW, lora=LORA, keep_reference=True, compile_layers=True)
    plain = plain_lora(copy.deepcopy(base), LORA)
    copy_adapters(engine, plain)
    train_both(engine, plain, 3)
    with engine.reference_weights():
        torch.testing.assert_close(engine_log_probs(engine), log_probs(base), atol=1e-5, rtol=1e-5)
    assert engine._functions.layer._compiled is not None
    engine.close()

"""Frozen parameters: the rest trains as in transformers with `requires_grad=False`, and nothing is kept for them."""

import fnmatch
from pathlib import Path

import pytest
import torch
from torch import nn

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.resources import HostPlan
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.host_store import ParameterState
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle

SETTINGS = AdamWConfig(lr=1e-4, weight_decay=0.1, decay_norms_and_biases=False)
LENGTHS = [11, 24, 5, 17]
# Whole units at either end and in between, units of which a part is frozen, and all but a few.
FROZEN = {
    "embedding": ["model.embed_tokens.*"],
    "head": ["lm_head.*", "model.norm.*"],
    "layers": ["model.layers.[01].*"],
    "parts of layers": ["*.mlp.*", "*layernorm*"],
    "norm of the head": ["model.norm.weight"],
    "all but one layer's attention": ["model.embed*", "model.layers.[02]*", "*.mlp.*", "*norm*", "lm_head*"],
}


def train(engine: StreamingEngine, steps: int) -> list[float]:
    """Norms of so many steps on random rows."""
    norms = []
    for step in range(steps):
        batches = oracle.split_micro_batches(oracle.random_rows(LENGTHS, seed=step), 2)
        engine.zero_grad()
        engine.forward_backward(batches, lambda index, outputs: -outputs.log_probs.sum() / 53)
        norms.append(engine.optimizer_step())
    return norms


def train_plain(model: nn.Module, steps: int) -> list[float]:
    """The same with transformers and torch."""
    optimizer, norms = oracle.plain_adamw(model, SETTINGS), []
    for step in range(steps):
        optimizer.zero_grad()
        rows = oracle.random_rows(LENGTHS, seed=step)
        (-torch.cat([oracle.plain_log_probs(model, row)[0] for row in rows]).sum() / 53).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_grad).item())
        optimizer.step()
    return norms


def freeze(model: nn.Module, patterns: list[str]) -> dict[str, torch.Tensor]:
    """Let torch freeze what the patterns name; returns copies."""
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return {name: parameter.clone() for name, parameter in frozen.items()}


@pytest.mark.parametrize("patterns", FROZEN.values(), ids=FROZEN.keys())
def test_three_steps_equal_torch_with_frozen_parameters(patterns: list[str]) -> None:
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, SETTINGS, freeze=patterns)
    frozen = freeze(model, patterns)
    assert train(engine, 3) == pytest.approx(train_plain(model, 3), rel=1e-5)
    plain, masters = dict(model.named_parameters()), oracle.masters(engine)
    for name, weight in masters.items():
        torch.testing.assert_close(weight, plain[name].detach(), atol=1e-5, rtol=1e-5)
        assert name not in frozen or torch.equal(weight, frozen[name])
    assert engine.counters.d2h_bytes == 3 * 4 * sum(engine.plan.trained_sizes)
    engine.close()


@pytest.mark.parametrize("whole_unit", ["embedding", "head"])
def test_update_shared_with_the_device_leaves_frozen_parts_alone(whole_unit: str) -> None:
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    settings = {"freeze": FROZEN["parts of layers"] + FROZEN[whole_unit], "optimizer_backend": "native"}
    whole = oracle.make_engine(model, config, SETTINGS, **settings, device_adamw=False)
    shared = oracle.make_engine(model, config, SETTINGS, **settings, device_adamw=True)
    assert train(shared, 3) == train(whole, 3)
    masters = oracle.masters(whole)
    assert all(torch.equal(weight, masters[name]) for name, weight in oracle.masters(shared).items())
    for engine in (whole, shared):
        engine.close()


@pytest.mark.parametrize("patterns", [["model.embed_tokens.weight"], ["model.norm.weight"]])
def test_tied_matrix_or_its_norm_frozen(patterns: list[str]) -> None:
    config = oracle.tiny_config("qwen2", tied=True)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, SETTINGS, freeze=patterns, wave_tokens=40)
    frozen = freeze(model, patterns)
    assert train(engine, 3) == pytest.approx(train_plain(model, 3), rel=1e-5)
    plain = dict(model.named_parameters())
    for name, weight in oracle.masters(engine).items():
        torch.testing.assert_close(weight, plain[name].detach(), atol=1e-5, rtol=1e-5)
        assert name not in frozen or torch.equal(weight, frozen[name])
    engine.close()


@pytest.mark.parametrize("reference", [False, True])
def test_host_plan_counts_two_bytes_for_what_is_frozen(reference: bool) -> None:
    config = StreamingConfig(freeze=["*.mlp.*", "model.embed_tokens.*"], speculative_adamw_gb=1.0)
    plan = plan_model(oracle.tiny_config("qwen2"), config.freeze)
    host_plan = HostPlan.of(plan, config, trainable=True, reference=reference)
    state = ParameterState.allocate(plan, config, trainable=True, reference=reference, register=False)
    assert host_plan.total - host_plan.bytes_by_kind["staging"] == state.nbytes
    trained, numel = sum(plan.trained_sizes), sum(plan.unit_sizes)
    assert 0 < trained < numel and plan.trained_sizes[0] == 0
    sent_as_reference = numel - plan.unit_sizes[0] if reference else 0
    spare = 12 * plan.unit_sizes[-1]  # of the head only: the layers are trained in part
    assert state.nbytes == 2 * numel + 12 * trained + 2 * sent_as_reference + spare
    state.close()


@pytest.mark.parametrize("saved, loaded", [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_checkpoint_of_a_partly_frozen_model(saved: str, loaded: str, tmp_path: Path) -> None:
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config).bfloat16().float()  # as a checkpoint: what is frozen is kept in bfloat16
    patterns = FROZEN["parts of layers"] + FROZEN["embedding"]
    first = oracle.make_engine(model, config, SETTINGS, freeze=patterns, dtype=saved)
    train(first, 2)
    first.save(tmp_path / "saved")
    second = oracle.make_engine(oracle.plain_model(config, seed=1), config, SETTINGS, freeze=patterns, dtype=loaded)
    second.load(tmp_path / "saved")
    assert all(torch.equal(mine, oracle.masters(first)[name]) for name, mine in oracle.masters(second).items())
    for engine in (first, second):
        engine.close()
    other = oracle.make_engine(model, config, SETTINGS, freeze=FROZEN["embedding"])
    with pytest.raises(ValueError, match="saved with 16 frozen parameters, the engine freezes 1 or others"):
        other.load(tmp_path / "saved")
    other.close()


def test_reference_of_a_frozen_unit_is_its_weights() -> None:
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(
        oracle.plain_model(config), config, SETTINGS, freeze=["model.layers.[01].*", "*.mlp.*"], keep_reference=True
    )
    batches = [oracle.pack(oracle.random_rows(LENGTHS))]
    (before,) = engine.forward(batches)
    train(engine, 2)
    with engine.reference_weights():
        (reference,) = engine.forward(batches)
    (after,) = engine.forward(batches)
    assert torch.equal(reference.log_probs, before.log_probs)
    assert not torch.equal(after.log_probs, before.log_probs)
    engine.close()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["model.embed_tokens"], "freeze='model.embed_tokens' fits no parameter of Qwen2ForCausalLM, .*lm_head.weight"),
        (["*"], "leaves no parameter to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_model(oracle.tiny_config("qwen2"), patterns)
    with pytest.raises(ValueError, match="freeze must be a list of patterns"):
        StreamingConfig(freeze="lm_head.*")

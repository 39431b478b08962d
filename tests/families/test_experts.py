"""Mixtures of experts: the router's auxiliary loss, experts without tokens, router biases."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.pass_plan import PassPlan
from tests import oracle
from tests.families.configs import HYBRID, family_config

LENGTHS = [11, 24, 5, 17, 9]
WITH_ROUTER_LOSS = ["Mixtral-8x7B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "GPT-OSS-20B"]


def plain_router_loss(model, rows):
    """transformers' function over the router logits of all rows, as if they were one batch."""
    by_row = [model(row[None], output_router_logits=True).router_logits for row in rows]
    logits = tuple(torch.cat(layer) for layer in zip(*by_row, strict=True))
    return load_balancing_loss_func(logits, model.num_experts, model.num_experts_per_tok)


@pytest.mark.parametrize("name", WITH_ROUTER_LOSS)
@pytest.mark.parametrize("size", [1, 3])
def test_router_loss_is_that_of_transformers_over_the_whole_step(name, size):
    config = family_config(name, output_router_logits=True, router_aux_loss_coef=0.5)
    # The recurrence of linear attention adds up rounding errors: see test_training.py.
    tolerance = 1e-3 if name in HYBRID else 1e-5
    model = oracle.plain_model(config)
    rows = oracle.random_rows(LENGTHS)
    router_loss = plain_router_loss(model, rows)
    tokens = sum(len(row) - 1 for row in rows)
    loss = -torch.cat([oracle.plain_log_probs(model, row)[0] for row in rows]).sum() / tokens
    (loss + 0.5 * router_loss).backward()
    engine = oracle.make_engine(model, config)
    assert oracle.engine_pass(engine, oracle.split_micro_batches(rows, size)) == pytest.approx(loss.item(), rel=1e-5)
    assert engine.router_loss.item() == pytest.approx(0.5 * router_loss.item(), rel=1e-5)
    plain = dict(model.named_parameters())
    norm = torch.stack([parameter.grad.norm() for parameter in plain.values()]).norm()
    for parameter, grad in oracle.engine_gradients(engine).items():
        expected = plain[parameter].grad
        assert (grad - expected).norm() <= tolerance * expected.norm() + 1e-7 * norm, parameter
    engine.close()


def test_router_loss_with_kept_layers_and_in_waves():
    """A wave has a router loss of its own, weighted by its tokens; layers that are not recomputed give the same."""
    config = family_config("Mixtral-8x7B", output_router_logits=True, router_aux_loss_coef=0.5)
    model = oracle.plain_model(config)
    waves = [oracle.random_rows([11, 24], seed=1), oracle.random_rows([5, 17, 9], seed=2)]
    shares = [35 / 66, 31 / 66]
    loss = sum(0.5 * share * plain_router_loss(model, rows) for share, rows in zip(shares, waves, strict=True))
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    batches = [oracle.pack(rows) for rows in waves]
    for kept, interval in ((0, 1), (0, 2), (2, 1)):
        engine = oracle.make_engine(model, config, checkpoint_interval=interval)
        engine.planner = oracle.FixedPlanner(PassPlan((1, 1), kept_layers=kept))
        engine.forward_backward(batches, lambda index, outputs: 0.0 * outputs.log_probs.sum())
        assert engine.router_loss.item() == pytest.approx(loss.item(), rel=1e-5)
        for name, grad in oracle.engine_gradients(engine).items():
            if expected[name] is not None:
                torch.testing.assert_close(grad, expected[name], atol=1e-7, rtol=1e-4)
        engine.close()


def test_experts_without_tokens_get_a_zero_gradient_and_follow_adamw():
    """Three tokens choose one of eight experts each; momentum and decay go on for the others."""
    config = family_config("Mixtral-8x7B", num_experts_per_tok=1)
    # The only expert has weight 1: the gradient for its choice is rounding, of which a small eps would make steps.
    settings = AdamWConfig(lr=1e-4, weight_decay=1.0, eps=1e-6)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, settings)
    optimizer = oracle.plain_adamw(model, settings)
    name = "model.layers.0.mlp.experts.down_proj"
    unused = set()
    for step, length in enumerate((40, 3, 3)):
        row = oracle.random_rows([length], seed=step)[0]
        optimizer.zero_grad()
        (-oracle.plain_log_probs(model, row)[0].sum() / (length - 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
        optimizer.step()
        oracle.engine_pass(engine, [oracle.pack([row])])
        used = oracle.engine_gradients(engine)[name].flatten(1).norm(dim=1) > 0
        unused |= set((~used).nonzero().flatten().tolist())
        engine.optimizer_step()
    assert len(unused) >= 5
    for parameter, weight in oracle.masters(engine).items():
        expected = model.get_parameter(parameter).detach()
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5, msg=parameter)
    engine.close()


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5-Air", "GLM-4.7-Flash"])
def test_router_biases_stay_float32_and_are_exported_as_they_were_loaded(name, tmp_path):
    config = family_config(name, dtype="bfloat16")  # as in the published configs
    model = oracle.plain_model(config)
    biases = {key: value for key, value in model.state_dict().items() if key.endswith("e_score_correction_bias")}
    assert len(biases) == config.num_hidden_layers - 1
    engine = oracle.make_engine(model, config, dtype="bfloat16", keep_reference=True)
    oracle.engine_pass(engine, [oracle.pack(oracle.random_rows(LENGTHS))])
    engine.optimizer_step()
    engine.save(tmp_path / "checkpoint")
    other = oracle.make_engine(oracle.plain_model(config, seed=1), config, dtype="bfloat16")
    other.load(tmp_path / "checkpoint")
    for each in (engine, other):
        exported = dict(each.named_weights())
        for key, bias in biases.items():
            assert exported[key].dtype is torch.float32
            torch.testing.assert_close(exported[key], bias, rtol=0, atol=0)
        each.close()

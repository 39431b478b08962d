"""The engine on a CUDA device: exactness in float32, error in bfloat16, memory, transfers."""

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from tests import oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MEDIUM = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
GENTLE_INIT = 0.02  # standard deviation; in bfloat16 the oracle's large weights would measure only rounding


def medium_model(family, tied=False):
    """A model large enough for the CUDA kernels of real models, float32 on the device."""
    config = oracle.tiny_config(
        family, layers=4, tied=tied, **MEDIUM, **({"head_dim": 64} if family == "qwen3" else {})
    )
    model = oracle.plain_model(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, GENTLE_INIT)
    return config, model.cuda()


def with_parameters_in(model, dtype):
    """The model on the device, without gradients. Its buffers stay float32, as in a model that `from_pretrained` loads:
    rounded rotary frequencies would turn queries and keys at later positions."""
    model.cuda().zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def mean_loss(model, rows):
    """Mean over all next tokens, and the log-probs."""
    log_probs = [oracle.plain_log_probs(model, row)[0] for row in rows]
    return -torch.cat(log_probs).mean(), torch.cat(log_probs).detach().float().cpu()


def flat_gradients(model):
    """All gradients of a plain model, float32 on the CPU, by name."""
    return {name: parameter.grad.float().cpu() for name, parameter in model.named_parameters()}


def plain_gradients(model, rows):
    """Gradients by name of plain transformers on CUDA, in float32 and in bfloat16, of weights that both types hold."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        plain = with_parameters_in(model, dtype)
        mean_loss(plain, rows)[0].backward()
        results.append(flat_gradients(plain))
    return results


def engine_results(engine, rows, size):
    """Log-probs, gradients by name and norm of one engine pass with the same loss."""
    batches = oracle.split_micro_batches(rows, size)
    tokens = sum(len(row) - 1 for row in rows)
    engine.zero_grad()
    outputs = engine.forward_backward(
        batches, lambda m, scores: -scores.log_probs.sum() / tokens, next_lr=engine._adamw_config.lr
    )
    log_probs = torch.cat(oracle.engine_log_probs(outputs, batches))
    return log_probs, oracle.engine_gradients(engine), engine.optimizer_step()


def distance(left, right):
    """Relative L2 distance of two dictionaries of tensors."""
    difference = sum((left[name].float() - right[name]).square().sum() for name in right)
    return (difference / sum(value.square().sum() for value in right.values())).sqrt().item()


@pytest.mark.parametrize("family, tied", [("qwen2", False), ("qwen2", True), ("llama", False), ("qwen3", False)])
@pytest.mark.parametrize("lengths", [[128] * 4, [128, 40, 77, 9]], ids=["equal", "packed"])
@pytest.mark.parametrize("resident_layers", [None, 0], ids=["planned", "lean"])
def test_float32_steps_equal_plain_adamw(family, tied, lengths, resident_layers):
    config, model = medium_model(family, tied)
    settings = AdamWConfig(lr=1e-4)
    chosen = {"resident_layers": resident_layers, "speculative_adamw_gb": 1.0 if resident_layers is None else 0.0}
    engine = oracle.make_engine(model.cpu(), config, settings, device="cuda", head_chunk_tokens=64, **chosen)
    model.cuda()
    optimizer = oracle.plain_adamw(model, settings)
    for step in range(3):
        rows = oracle.random_rows(lengths, seed=step)
        optimizer.zero_grad()
        loss, log_probs = mean_loss(model, rows)
        loss.backward()
        grads = flat_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad).item()
        optimizer.step()
        got_log_probs, got_grads, got_norm = engine_results(engine, rows, 2)
        torch.testing.assert_close(got_log_probs, log_probs, atol=1e-4, rtol=1e-5)
        assert distance(got_grads, grads) < 1e-4
        assert got_norm == pytest.approx(norm, rel=1e-4)
    engine.close()


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "mistral"])
@pytest.mark.parametrize("implementation", ["auto", "sdpa", "varlen"])
def test_bfloat16_is_as_close_to_float32_as_plain_bfloat16(family, implementation):
    """Both run on the same bfloat16 weights; the error is against float32 on these weights, at most 1.5 x plain's."""
    config, model = medium_model(family)
    model = with_parameters_in(model, torch.bfloat16)
    engine = oracle.make_engine(
        model.cpu(), config, device="cuda", dtype="bfloat16", head_chunk_tokens=128, attn_implementation=implementation
    )
    rows = oracle.random_rows([256, 90, 177, 31], seed=3)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain = with_parameters_in(model, dtype)
        loss, log_probs = mean_loss(plain, rows)
        loss.backward()
        results[dtype] = log_probs, flat_gradients(plain)
    log_probs, grads = results[torch.float32]
    plain_log_probs, plain_grads = results[torch.bfloat16]
    got_log_probs, got_grads, _ = engine_results(engine, rows, 2)
    plain_errors = (plain_log_probs - log_probs).square().mean().sqrt().item(), distance(plain_grads, grads)
    errors = (got_log_probs - log_probs).square().mean().sqrt().item(), distance(got_grads, grads)
    print(
        f"{family} {implementation}: log-probs {errors[0]:.2e} (plain {plain_errors[0]:.2e}), "
        f"gradients {errors[1]:.2e} (plain {plain_errors[1]:.2e})"
    )
    assert errors[0] <= 1.5 * plain_errors[0]
    assert errors[1] <= 1.5 * plain_errors[1]
    engine.close()


def test_compiled_layers_are_as_close_as_plain_ones():
    config, model = medium_model("qwen2")
    model = model.bfloat16()
    rows = oracle.random_rows([256, 90, 177, 31], seed=3)
    results = []
    for compiled in (False, True):
        engine = oracle.make_engine(
            model.cpu(), config, device="cuda", dtype="bfloat16", head_chunk_tokens=128, compile_layers=compiled
        )
        results.append(engine_results(engine, rows, 2))
        engine.close()
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-2, rtol=0)
    assert distance(results[1][1], results[0][1]) < 1e-2


@pytest.mark.parametrize("interval", [1, 2])
def test_spilled_inputs_and_waves_give_the_gradients_of_one_resident_wave(interval):
    config, model = medium_model("qwen2")
    rows = oracle.random_rows([128] * 6)
    grads = []
    for settings in ({}, {"device_activation_gb": 0.0}, {"device_activation_gb": 0.0, "wave_tokens": 256}):
        engine = oracle.make_engine(
            model.cpu(), config, device="cuda", head_chunk_tokens=64, checkpoint_interval=interval, **settings
        )
        grads.append(engine_results(engine, rows, 1)[1])
        engine.close()
    for other in grads[1:]:
        assert distance(other, grads[0]) < 1e-5


def test_device_memory_is_given_back_and_transfers_follow_the_plan():
    config, model = medium_model("qwen2")
    engine = oracle.make_engine(model.cpu(), config, device="cuda", dtype="bfloat16", resident_layers=0)
    del model
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    rows = oracle.random_rows([64] * 8)
    for size in (8, 4, 1):
        sent, received = engine.counters.h2d_bytes, engine.counters.d2h_bytes
        engine_results(engine, rows, size)
        layers = sum(unit.numel for unit in engine.plan.layers)
        edges = engine.plan.embedding.numel + engine.plan.head.numel
        still_there = sum(unit.numel for unit in engine.plan.layers[-2:])  # at the turn
        assert engine.counters.h2d_bytes - sent == 2 * (2 * layers - still_there + edges)
        assert engine.counters.d2h_bytes - received == 2 * (layers + edges)
    engine.release_device()
    assert torch.cuda.memory_allocated() - before <= 64 << 20
    assert torch.cuda.memory_reserved() <= 256 << 20
    engine.close()


def test_deepspeed_and_torch_agree():
    """Both kernels on the same gradients (attention's backward pass on CUDA does not repeat its bits)."""
    pytest.importorskip("deepspeed")
    config, model = medium_model("qwen2")
    engines = [
        oracle.make_engine(model.cpu(), config, device="cuda", dtype="bfloat16", optimizer_backend=backend)
        for backend in ("deepspeed", "torch")
    ]
    for step in range(3):
        engine_results(engines[0], oracle.random_rows([64] * 4, seed=step), 4)
        for unit, other in zip(engines[0].state.units, engines[1].state.units, strict=True):
            other.grad.copy_(unit.grad)
        engines[1]._gradients._added_on_host = True  # take the norm of the copied gradients
        engines[1].optimizer_step()
    assert distance(oracle.masters(engines[0]), oracle.masters(engines[1])) < 1e-6
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("folder", [None, "."])  # nothing is left there
def test_reference_weights_stay_those_first_loaded(folder):
    config, model = medium_model("qwen2")
    engine = oracle.make_engine(
        model.cpu(), config, AdamWConfig(lr=1e-3), device="cuda", keep_reference=True, reference_folder=folder
    )
    batches = oracle.split_micro_batches(oracle.random_rows([64] * 4), 4)
    first = engine.forward(batches)[0].log_probs.clone()
    for step in range(2):
        engine_results(engine, oracle.random_rows([64] * 4, seed=step), 4)
    with engine.reference_weights():
        assert torch.equal(engine.forward(batches)[0].log_probs, first)
    assert not torch.equal(engine.forward(batches)[0].log_probs, first)
    engine.close()

"""Models that take images on a CUDA device: exactness in float32, error in bfloat16, memory given back."""

import copy

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from tests import oracle
from tests.gpu.test_engine_cuda import distance, flat_gradients
from tests.gpu.test_families_cuda import skip_refused_kernels
from tests.vision import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COUNTS = [1, 0, 2]
# The published size of heads, by which kernels are chosen, where a config sets it apart from the hidden size.
HEADS = {
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "llava_next": {"head_dim": 128},
    "qwen3_vl": {"head_dim": 128, "rope_parameters": {**cases.ROPE, "mrope_section": [24, 20, 20]}},
    "qwen3_5": {
        "head_dim": 256,
        "rope_parameters": {**cases.ROPE, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}


def on_device(rows):
    """The same rows on the GPU, for the plain model."""
    moved = [None if row.images is None else {k: v.cuda() for k, v in row.images.items()} for row in rows]
    return [cases.Row(row.ids.cuda(), images) for row, images in zip(rows, moved, strict=True)]


def plain_gradients(model, rows):
    """Mean loss over all next tokens, and gradients by name; of parameters that get one."""
    model.zero_grad()
    loss = -torch.cat([cases.plain_log_probs(model, row) for row in on_device(rows)]).mean()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return loss.item(), flat_gradients(model)


@pytest.mark.parametrize("resident_layers", [None, 0], ids=["planned", "lean"])
@pytest.mark.parametrize("family", cases.CONFIGS)
def test_float32_gradients_equal_plain_transformers(family, resident_layers):
    config = cases.tiny_config(family)
    skip_refused_kernels(config)
    model = cases.plain_model(copy.deepcopy(config))
    adamw = AdamWConfig(lr=1e-4)
    engine = oracle.make_engine(model, config, adamw, device="cuda", resident_layers=resident_layers)
    model.cuda()
    for step in range(2):  # the second one with what the first has measured
        rows = cases.rows(family, COUNTS, seed=step)
        loss, expected = plain_gradients(model, rows)
        found_loss = oracle.engine_pass(engine, [cases.pack(rows[:2]), cases.pack(rows[2:])])
        found = oracle.engine_gradients(engine)
        assert found_loss == pytest.approx(loss, rel=1e-4)
        assert distance(found, {name: expected[name] for name in found}) < 1e-3
    engine.close()


@pytest.mark.parametrize("family", cases.CONFIGS)
def test_bfloat16_is_as_near_to_float32_as_plain_transformers(family):
    # All experts, since a choice that rounding turns outweighs other errors.
    experts = {"num_experts_per_tok": 4} if family.endswith("_moe") else {}
    config = cases.tiny_config(family, **HEADS.get(family.removesuffix("_moe"), {}), **experts)
    skip_refused_kernels(config)
    model = cases.plain_model(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    engine = oracle.make_engine(model, config, AdamWConfig(lr=1e-4), device="cuda", dtype="bfloat16")
    rows = cases.rows(family, COUNTS)
    _, exact = plain_gradients(model.cuda(), rows)
    _, plain = plain_gradients(copy.deepcopy(model).bfloat16(), rows)
    oracle.engine_pass(engine, [cases.pack(rows)])
    found = oracle.engine_gradients(engine)
    wanted = {name: exact[name] for name in found}
    errors = distance(found, wanted), distance(plain, wanted)
    print(f"{family}: engine {errors[0]:.4f}, plain bfloat16 {errors[1]:.4f}")
    assert errors[0] < 1.5 * errors[1] + 0.01
    engine.release_device()
    del model
    assert torch.cuda.memory_allocated() < 64 << 20
    engine.close()

"""Models that take images: the engine against plain transformers and torch.optim.AdamW, float32 on CPU."""

import copy

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from tests import oracle
from tests.vision import cases

COUNTS = [1, 0, 2]  # images per row
# Rounding that grows on the way back to the encoder: plain transformers in float32 is as far from itself in float64.
TOLERANCES = {"qwen3_5": 1e-4, "qwen3_5_moe": 1e-4, "gemma3": 3e-4}

SETTINGS = {1: [{}, {"wave_tokens": 150}], 3: [{"checkpoint_interval": 2}]}  # by rows per micro-batch
ALWAYS = ("qwen3_vl",)  # whose features go furthest into the decoder; the others run all settings with --full


def combinations():
    for family in cases.CONFIGS:
        for size, several in SETTINGS.items():
            for settings in several:
                slow = [pytest.mark.slow] if settings and family not in ALWAYS else []
                name = "-".join([family, str(size), *settings])
                yield pytest.param(family, size, settings, marks=slow, id=name)


def plain_step(model, optimizer, rows, clip):
    """One plain step on the mean over all next tokens; returns loss, gradients before clipping, and their norm."""
    tokens = sum(len(row.ids) - 1 for row in rows)
    optimizer.zero_grad()
    loss = -torch.cat([cases.plain_log_probs(model, row) for row in rows]).sum() / tokens
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
    optimizer.step()
    return loss.item(), grads, norm


@pytest.mark.parametrize("family, size, settings", list(combinations()))
def test_three_steps_equal_plain_adamw(family, size, settings):
    config = cases.tiny_config(family)
    tolerance = TOLERANCES.get(family, 1e-5)
    # Where a gradient is rounding alone (biases of keys), AdamW without a larger eps makes whole steps of it.
    adamw = AdamWConfig(lr=1e-4, weight_decay=0.1, eps=1e-6)
    model = cases.plain_model(copy.deepcopy(config))
    engine = oracle.make_engine(model, config, adamw, **settings)
    optimizer = oracle.plain_adamw(model, adamw)
    for step in range(3):
        rows = cases.rows(family, COUNTS, seed=step)
        loss, grads, norm = plain_step(model, optimizer, rows, adamw.clip_grad)
        batches = [cases.pack(rows[start : start + size]) for start in range(0, len(rows), size)]
        assert oracle.engine_pass(engine, batches) == pytest.approx(loss, rel=1e-5)
        found = oracle.engine_gradients(engine)
        assert found.keys() == grads.keys()
        for name, grad in found.items():
            assert (grad - grads[name]).norm() <= tolerance * grads[name].norm() + 1e-6 * norm, name
            assert grads[name].norm() > 0 or "language_model" in name, name
        assert engine.optimizer_step() == pytest.approx(norm, rel=tolerance)
    plain = dict(model.named_parameters())
    for name, weight in oracle.masters(engine).items():
        # Attention without rotary embeddings does not depend on its key bias: that one's AdamW steps are of rounding.
        atol = 6e-4 if name.startswith("model.vision_tower") and name.endswith("k_proj.bias") else 1e-5
        torch.testing.assert_close(weight, plain[name].detach(), atol=atol, rtol=1e-5, msg=name)
    engine.close()

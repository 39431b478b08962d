"""Training of every family against plain transformers and torch.optim.AdamW: float32 on CPU, rows packed together."""

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from tests import oracle
from tests.families.configs import FAMILIES, HYBRID, family_config
from tests.streaming.test_parity import plain_step

LENGTHS = [11, 24, 5, 17, 9]  # longer and shorter than windows, chunks and the lengths that rotary embeddings switch at
STEPS = 3


def check_three_steps(name, config, size, extra=None, **settings):
    """An engine with these settings goes the way of plain AdamW: loss, all gradients, norm, and weights at the end.

    `size`: rows per micro-batch; `extra`: what the model's own loss adds, see `plain_step`.
    """
    # The recurrence of linear attention adds up rounding errors: plain float32 is 4e-4 away from float64 here.
    tolerance = 1e-3 if name in HYBRID else 1e-5
    # Where a gradient is rounding alone (biases of keys), AdamW without a larger eps makes whole steps of it.
    # The step is small, so that rounding in one step is not in the gradients of the next, and the decay large.
    adamw = AdamWConfig(lr=1e-4, weight_decay=1.0, eps=1e-6)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, adamw, **settings)
    optimizer = oracle.plain_adamw(model, adamw)
    for step in range(STEPS):
        rows = oracle.random_rows(LENGTHS, seed=step)
        loss, grads, norm = plain_step(model, optimizer, rows, adamw.clip_grad, extra)
        assert oracle.engine_pass(engine, oracle.split_micro_batches(rows, size)) == pytest.approx(loss, rel=1e-5)
        engine_grads = oracle.engine_gradients(engine)
        assert engine_grads.keys() == grads.keys()
        for parameter, grad in engine_grads.items():
            assert (grad - grads[parameter]).norm() <= tolerance * grads[parameter].norm() + 1e-7 * norm, parameter
        assert engine.optimizer_step() == pytest.approx(norm, rel=tolerance)
    plain = dict(model.named_parameters())
    for parameter, weight in oracle.masters(engine).items():
        torch.testing.assert_close(weight, plain[parameter].detach(), atol=1e-5, rtol=1e-5)
    engine.close()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_three_steps_equal_plain_adamw(name, size):
    check_three_steps(name, family_config(name), size)

"""Linear attention on flash-linear-attention: packed rows are rows alone, and nothing leaks from one to the next."""

import pytest
import torch

from megatrain_verl.streaming.linear_attention import takes_boundaries
from tests import oracle
from tests.gpu.test_engine_cuda import distance, engine_results
from tests.gpu.test_families_cuda import LENGTHS, check_bfloat16_error, skip_refused_kernels, wide_model

pytest.importorskip("fla", reason="flash-linear-attention is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = ["Qwen3-Next-80B-A3B", "Qwen3.5-27B"]


def engine_of(name, **settings):
    """A bfloat16 engine whose linear attention takes packed rows; every token goes to all experts."""
    every = {"num_experts_per_tok": 8} if name == "Qwen3-Next-80B-A3B" else {}
    config, model = wide_model(name, **every)
    engine = oracle.make_engine(model.cpu(), config, device="cuda", dtype="bfloat16", **settings)
    modules = [module for layer in engine.plan.structures for module in layer.modules()]
    linear = [module for module in modules if hasattr(module, "chunk_gated_delta_rule")]
    assert linear and all(takes_boundaries(module) for module in linear)
    return engine


@pytest.mark.parametrize("name", NAMES)
def test_packed_log_probs_are_those_of_rows_alone(name):
    engine = engine_of(name, forward_only=True)
    rows = oracle.random_rows(LENGTHS)
    scores = []
    for size in (1, len(rows)):
        batches = oracle.split_micro_batches(rows, size)
        scores.append(torch.cat(oracle.engine_log_probs(engine.forward(batches), batches)))
    print(f"{name}: packed and alone differ by up to {(scores[1] - scores[0]).abs().max():.1e}")
    torch.testing.assert_close(scores[1], scores[0], atol=5e-2, rtol=0)
    engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_change_with_the_rows_before_it(name):
    engine = engine_of(name, forward_only=True)
    first, other, last = oracle.random_rows([40, 40, 64])
    batches = [oracle.pack([before, last]) for before in (first, other)]
    results = [oracle.engine_log_probs(engine.forward([batch]), [batch]) for batch in batches]
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_packed_gradients_are_those_of_rows_alone(name):
    skip_refused_kernels(wide_model(name)[0])
    engine = engine_of(name)
    rows = oracle.random_rows(LENGTHS)
    gradients = []
    for size in (1, len(rows)):
        gradients.append(engine_results(engine, rows, size)[1])
        engine.load_weights(wide_model(name)[1].cpu().state_dict().items())
    error = distance(gradients[1], {key: grad.float() for key, grad in gradients[0].items()})
    print(f"{name}: gradients of packed rows {error:.4f} from those of rows alone")
    assert error < 0.05
    engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_error_is_that_of_plain_bfloat16(name):
    check_bfloat16_error(name)

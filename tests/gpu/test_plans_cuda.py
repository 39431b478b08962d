"""Whatever the planner may choose computes the same: kept or recomputed, resident or sent, compiled or not."""

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.pass_plan import PassPlan
from tests import oracle
from tests.gpu.test_engine_cuda import distance, engine_results, medium_model, plain_gradients, with_parameters_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PLANS = {
    "streamed": PassPlan((4,)),
    "half kept": PassPlan((4,), layer_slots=3, kept_layers=2, keep_logit_gradients=True),
    "all kept": PassPlan((4,), layer_slots=4, kept_layers=4, keep_logit_gradients=True),
    "resident waves": PassPlan((2, 2), layer_slots=4, kept_layers=4, resident_gradients=True),
    "resident waves, streamed": PassPlan((1, 3), resident_gradients=True, keep_logit_gradients=True),
}
LENGTHS = {"equal": [128] * 8, "packed": [128, 40, 77, 9, 100, 64, 31, 128]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("backend", ["native", "deepspeed", "torch"])
def test_bfloat16_error_of_every_plan_is_that_of_plain_bfloat16(lengths, compiled, backend):
    if backend == "deepspeed":
        pytest.importorskip("deepspeed")
    config, model = medium_model("qwen2")
    model = with_parameters_in(model, torch.bfloat16)
    rows = oracle.random_rows(lengths, seed=3)
    exact, plain = plain_gradients(model, rows)
    plain_error = distance(plain, exact)
    settings = {"dtype": "bfloat16", "compile_layers": compiled, "optimizer_backend": backend}
    engine = oracle.make_engine(
        model.float().cpu(), config, AdamWConfig(lr=1e-4), device="cuda", head_chunk_tokens=128, **settings
    )
    before = oracle.masters(engine)
    for name, plan in PLANS.items():
        engine.planner = oracle.FixedPlanner(plan)
        engine.load_weights(before.items())
        for unit in engine.state.units:
            unit.exp_avg.zero_()
            unit.exp_avg_sq.zero_()
        engine.step_count = 0
        _, grads, norm = engine_results(engine, rows, 2)
        error = distance(grads, exact)
        print(f"{name}, {'compiled' if compiled else 'plain'}, {backend}: {error:.2e} (plain bf16 {plain_error:.2e})")
        assert error <= 1.5 * plain_error, name
        expected = {name: weight.clone() for name, weight in before.items()}
        for weight_name, weight in expected.items():
            parameter = torch.nn.Parameter(weight)
            parameter.grad = grads[weight_name].float() * min(1.0, 1.0 / (norm + 1e-6))
            torch.optim.AdamW([parameter], lr=1e-4, weight_decay=engine._adamw_config.weight_decay).step()
        assert distance(oracle.masters(engine), expected) < 1e-6, name
    engine.close()

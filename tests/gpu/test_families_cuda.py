"""Every family on a CUDA device: exactness in float32, and in bfloat16 an error no larger than plain bfloat16's.

Here the kernels of CUDA run that no CPU test sees: flex attention with sinks and soft-caps, variable-length attention
with windows and with values narrower than keys, grouped matrix products of experts, compiled layers.
"""

import pytest
import torch

from tests import oracle
from tests.families.configs import FAMILIES, family_config
from tests.gpu.test_engine_cuda import distance, engine_results, flat_gradients, mean_loss, plain_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Widths that the kernels take: heads of 64, multiples of 16 bytes elsewhere.
WIDTHS = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size_mlp": 256,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
}
OWN_WIDTHS = ("SmolLM2-135M", "Phi-4-mini")  # heads or rotary factors that fit no other width
NAMES = [name for name in FAMILIES if name not in OWN_WIDTHS]
LENGTHS = [40, 24, 5, 17, 64, 9]


def wide_model(name):
    """A float32 model of a family on the device; MLA families set the head size themselves."""
    known = family_config(name)
    widths = {key: value for key, value in WIDTHS.items() if getattr(known, key, None) is not None}
    if "kv_lora_rank" in widths:
        widths.pop("head_dim", None)
    config = family_config(name, **widths)
    model = oracle.plain_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    return config, model.cuda()


@pytest.mark.parametrize("name", NAMES)
def test_float32_gradients_equal_plain_transformers(name):
    config, model = wide_model(name)
    rows = oracle.random_rows(LENGTHS)
    mean_loss(model, rows)[0].backward()
    expected = flat_gradients(model)
    engine = oracle.make_engine(model.cpu(), config, device="cuda")
    _, gradients, _ = engine_results(engine, rows, 3)
    engine.close()
    assert distance(gradients, expected) < 1e-4


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_error_is_that_of_plain_bfloat16(name, compiled):
    config, model = wide_model(name)
    model = model.bfloat16()  # weights that both types hold
    rows = oracle.random_rows(LENGTHS)
    exact, plain = plain_gradients(model, rows)
    plain_error = distance(plain, exact)
    engine = oracle.make_engine(model.cpu(), config, device="cuda", dtype="bfloat16", compile_layers=compiled)
    _, gradients, _ = engine_results(engine, rows, 3)
    engine.close()
    error = distance(gradients, exact)
    print(f"{name}: bfloat16 gradients {error:.4f} from float32, plain bfloat16 {plain_error:.4f}")
    assert error < 1.5 * plain_error

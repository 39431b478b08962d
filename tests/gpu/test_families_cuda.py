"""Every family on a CUDA device: exactness in float32, and in bfloat16 an error no larger than plain bfloat16's.

Here the kernels of CUDA run that no CPU test sees: flex attention with sinks and soft-caps, variable-length attention
with windows and with values narrower than keys, grouped matrix products of experts, compiled layers.
"""

import pytest
import torch

from megatrain_verl.model_sizes import num_experts
from megatrain_verl.streaming.linear_attention import check_kernels
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle
from tests.families.configs import FAMILIES, HYBRID, family_config
from tests.gpu.test_engine_cuda import (
    distance,
    engine_results,
    flat_gradients,
    mean_loss,
    plain_gradients,
    with_parameters_in,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Of every part but the heads: multiples of 16 bytes. Kernels are chosen by the size of heads, which is as published.
WIDTHS = {
    "hidden_size": 384,
    "intermediate_size": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size_mlp": 256,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
}
HEAD = {  # 128 in all other families
    "SmolLM2-135M": 64,
    "Qwen2.5-0.5B": 64,
    "Phi-3-mini-4k": 96,
    "Gemma-2-9B": 256,
    "Qwen3.5-27B": 256,
    "Qwen3-Next-80B-A3B": 256,
    "Qwen3.5-35B-A3B": 256,
    "GPT-OSS-20B": 64,
}
MLA = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
OWN = {
    "GLM-4.7-Flash": {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
    "Gemma-3-1B": {"head_dim": 256, "query_pre_attn_scalar": 256},
}
NAMES = [name for name in FAMILIES if name != "Phi-4-mini"]  # its rotary factors fit no other width
# One of each kind of layer, since compilation takes longest: heads with norms, soft-caps and windows in flex attention,
# sinks, values narrower than keys, chunks and rows apart, linear attention. The other mixtures have their experts.
COMPILED = ["Qwen3-8B", "Gemma-2-9B", "GPT-OSS-20B", "DeepSeek-V3", "Llama-4-Scout", "Qwen3-Next-80B-A3B"]
LENGTHS = [40, 24, 5, 17, 64, 9]
# Flex attention works on blocks of 128 x 128 tokens: the first three rows have one that is read whole.
LONGER = [40, 24, 250, 17, 64, 9]


def wide_model(name, **settings):
    """A float32 model of a family on the device, with the published size of heads."""
    known = family_config(name)
    widths = {key: value for key, value in WIDTHS.items() if getattr(known, key, None) is not None}
    heads = MLA if "kv_lora_rank" in widths else {"head_dim": HEAD.get(name, 128)}
    config = family_config(name, **{**widths, **heads, **OWN.get(name, {}), **settings})
    model = oracle.plain_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05)
    return config, model.cuda()


def skip_refused_kernels(config):
    """Skip a test where the engine refuses to train with the installed flash-linear-attention (see its own tests)."""
    try:
        check_kernels(plan_model(config).structures)
    except ValueError as error:
        pytest.skip(str(error))


def check_bfloat16_error(name, **engine_settings):
    """Gradients in bfloat16 are at most 1.5 times as far from float32's, on the same weights, as plain bfloat16's.

    Every token goes to all experts: a choice that rounding has turned would outweigh all other errors.
    """
    known = family_config(name)
    settings = {"num_experts_per_tok": number} if (number := num_experts(known)) else {}
    settings |= {"topk_group": known.n_group} if getattr(known, "n_group", None) else {}
    config, model = wide_model(name, **settings)
    skip_refused_kernels(config)
    model = with_parameters_in(model, torch.bfloat16)  # weights that both types hold
    rows = oracle.random_rows(LONGER)
    exact, plain = plain_gradients(model, rows)
    plain_error = distance(plain, exact)
    engine = oracle.make_engine(model.cpu(), config, device="cuda", dtype="bfloat16", **engine_settings)
    _, gradients, _ = engine_results(engine, rows, 3)
    engine.close()
    error = distance(gradients, exact)
    print(f"{name} {engine_settings}: bfloat16 gradients {error:.4f} from float32, plain bfloat16 {plain_error:.4f}")
    assert error <= 1.5 * plain_error


@pytest.mark.parametrize("name", NAMES)
def test_float32_gradients_equal_plain_transformers(name):
    config, model = wide_model(name)
    skip_refused_kernels(config)
    rows = oracle.random_rows(LENGTHS)
    mean_loss(model, rows)[0].backward()
    expected = flat_gradients(model)
    engine = oracle.make_engine(model.cpu(), config, device="cuda")
    _, gradients, _ = engine_results(engine, rows, 3)
    engine.close()
    # The recurrence of linear attention adds up rounding errors: see tests/families/test_training.py.
    assert distance(gradients, expected) < (1e-3 if name in HYBRID else 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_error_is_that_of_plain_bfloat16(name):
    check_bfloat16_error(name)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", COMPILED)
def test_bfloat16_error_of_compiled_layers_is_that_of_plain_bfloat16(name):
    check_bfloat16_error(name, compile_layers=True)

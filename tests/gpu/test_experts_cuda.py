"""Mixtures on a CUDA device: experts streamed in parts, and router biases that stay float32 in a bfloat16 model."""

import pytest
import torch

from tests import oracle
from tests.families.configs import family_config
from tests.gpu.test_engine_cuda import distance, engine_results, flat_gradients, mean_loss
from tests.gpu.test_families_cuda import LENGTHS, check_bfloat16_error, wide_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

IN_PARTS = ["GPT-OSS-20B", "Qwen3-30B-A3B", "DeepSeek-V3"]
PARTS = 3  # of 8 experts: 2, 3 and 3
WITH_ROUTER_BIAS = ["DeepSeek-V3", "GLM-4.5-Air", "GLM-4.7-Flash"]


@pytest.mark.parametrize("name", IN_PARTS)
def test_float32_gradients_of_parts_equal_plain_transformers(name):
    config, model = wide_model(name)
    rows = oracle.random_rows(LENGTHS)
    mean_loss(model, rows)[0].backward()
    expected = flat_gradients(model)
    engine = oracle.make_engine(model.cpu(), config, device="cuda", expert_parts=PARTS)
    _, gradients, _ = engine_results(engine, rows, 3)
    engine.close()
    assert distance(gradients, expected) < 1e-4


@pytest.mark.parametrize("name", IN_PARTS)
def test_bfloat16_error_of_parts_is_that_of_plain_bfloat16(name):
    check_bfloat16_error(name, expert_parts=PARTS)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["GPT-OSS-20B", "Qwen3-30B-A3B"])
def test_bfloat16_error_of_compiled_parts_is_that_of_plain_bfloat16(name):
    check_bfloat16_error(name, expert_parts=PARTS, compile_layers=True)


def test_parts_need_less_device_memory_than_whole_layers():
    config = family_config("Qwen3-30B-A3B", hidden_size=512, moe_intermediate_size=512, mlp_only_layers=[])
    model, rows = oracle.plain_model(config), oracle.random_rows(LENGTHS)
    peaks = []
    for parts in (1, 8):
        engine = oracle.make_engine(model, config, device="cuda", expert_parts=parts, resident_layers=0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine_results(engine, rows, 6)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        engine.close()
    print("peak device memory, MiB: whole layers {:.1f}, eight parts {:.1f}".format(*(peak / 2**20 for peak in peaks)))
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("parts", [1, PARTS])
@pytest.mark.parametrize("name", WITH_ROUTER_BIAS)
def test_router_biases_stay_float32_on_the_device_and_in_the_export(name, parts):
    """The biases differ by less than a bfloat16 step, and by more than scores do: in float32 they alone choose."""
    config, model = wide_model(name, dtype="bfloat16")  # as in the published configs
    biases = {key: value for key, value in model.state_dict().items() if key.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.copy_(1e5 + 2 * torch.arange(len(bias)))
        assert len(bias.bfloat16().unique()) == 1
    expected = {key: bias.cpu().clone() for key, bias in biases.items()}
    model = model.cpu()
    engine = oracle.make_engine(model, config, device="cuda", dtype="bfloat16", expert_parts=parts)
    _, gradients, _ = engine_results(engine, oracle.random_rows(LENGTHS), 3)
    exported = {key: weight.clone() for key, weight in engine.named_weights()}
    engine.close()
    experts = {key: grad for key, grad in gradients.items() if key.endswith("experts.down_proj")}
    assert len(experts) == len(expected) == config.num_hidden_layers - 1
    for key, grad in experts.items():
        chosen = grad.flatten(1).norm(dim=1).nonzero().flatten().tolist()
        assert chosen == [5, 6, 7], key
    for key, bias in expected.items():
        assert exported[key].dtype is torch.float32 and torch.equal(exported[key].cpu(), bias)
    norms = [weight for key, weight in exported.items() if key.endswith("norm.weight")]
    assert norms and all(weight.dtype is torch.bfloat16 for weight in norms)

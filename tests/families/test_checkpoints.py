"""Every family's checkpoints: a folder as transformers writes it -> the engine -> an export -> transformers."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.checkpoint import export_pretrained
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.weight_folder import read_weights
from tests.families.configs import FAMILIES, family_config
from tests.oracle import plain_model

ROUTER_BIAS = "e_score_correction_bias"
FP8_BLOCK = [24, 20]  # fits no side: the last block of each is cut off
FURTHER_LAYER = 61  # which transformers leaves out by this number


def forward_engine(config: PretrainedConfig, folder: Path, dtype: str) -> StreamingEngine:
    engine = StreamingEngine(copy.deepcopy(config), StreamingConfig(dtype=dtype), None, device="cpu")
    engine.load_weights(folder)
    return engine


@pytest.mark.parametrize("name", FAMILIES)
def test_folder_of_transformers_comes_back_from_the_engine(name: str, tmp_path: Path):
    config = family_config(name)
    model = plain_model(config)
    model.save_pretrained(tmp_path / "hub")
    engine = forward_engine(config, tmp_path / "hub", "bfloat16")
    export_pretrained(tmp_path / "exported", engine.named_weights(), config, 0)
    engine.close()

    hub, exported = dict(read_weights(tmp_path / "hub")), dict(read_weights(tmp_path / "exported"))
    assert exported.keys() == hub.keys()
    for key, tensor in hub.items():
        assert exported[key].dtype is (torch.float32 if ROUTER_BIAS in key else torch.bfloat16), key
        assert torch.equal(exported[key].float(), tensor.bfloat16().float() if ROUTER_BIAS not in key else tensor), key
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    expected = model.state_dict()
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(
            tensor.float(), expected[key].bfloat16().float() if ROUTER_BIAS not in key else expected[key]
        )


def mxfp4_folder(folder: Path, config: PretrainedConfig) -> dict[str, Tensor]:
    """GPT-OSS as published: experts in MXFP4, the rest in bfloat16. Returns what the weights stand for."""
    model = plain_model(config)
    model.save_pretrained(folder)
    weights, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weights[name] = expected[name] = weight.bfloat16()
            continue
        experts, columns, rows = weight.shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        expected[name] = convert_moe_packed_tensors(weights[f"{name}_blocks"], weights[f"{name}_scales"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    return expected


def fp8_folder(folder: Path, config: PretrainedConfig) -> dict[str, Tensor]:
    """DeepSeek-V3 as published: projections and experts, each its own tensor, in FP8; router biases in float32; the
    layer after the last, which predicts a further token, in the files too. Returns what the weights stand for.
    """
    model = plain_model(config)
    model.save_pretrained(folder)
    weights, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = expected[name] = weight if ROUTER_BIAS in name else weight.bfloat16()
            continue
        grid = [-(-size // block) for size, block in zip(weight.shape, FP8_BLOCK, strict=True)]
        weights[name] = weight.to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = factors = torch.rand(grid) + 0.5
        rows, columns = (torch.arange(size) // block for size, block in zip(weight.shape, FP8_BLOCK, strict=True))
        expected[name] = (weights[name].float() * factors[rows][:, columns]).bfloat16()
    further = {name: value for name, value in weights.items() if ".layers.1." in name}
    weights |= {
        name.replace(".layers.1.", f".layers.{FURTHER_LAYER}."): value.clone() for name, value in further.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": FP8_BLOCK}
    config.save_pretrained(folder)
    return expected


def test_fp8_folder_of_deepseek_loads_is_exported_in_bfloat16_and_loads_again(tmp_path: Path):
    config = family_config("DeepSeek-V3")
    expected = fp8_folder(tmp_path / "fp8", config)
    assert any(".experts.7.down_proj" in name for name in expected) and any(ROUTER_BIAS in name for name in expected)
    engine = forward_engine(config, tmp_path / "fp8", "bfloat16")
    export_pretrained(tmp_path / "exported", engine.named_weights(), config, 0)
    engine.close()
    exported = dict(read_weights(tmp_path / "exported"))
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        assert exported[name].dtype is weight.dtype and torch.equal(exported[name], weight), name
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert not hasattr(plain.config, "quantization_config")
    again = forward_engine(plain.config, tmp_path / "exported", "bfloat16")
    assert all(torch.equal(weight, expected[name]) for name, weight in again.named_weights())
    again.close()


def test_mxfp4_folder_loads_is_exported_in_bfloat16_and_loads_again(tmp_path: Path):
    config = family_config("GPT-OSS-20B", intermediate_size=64)
    expected = mxfp4_folder(tmp_path / "mxfp4", config)
    engine = forward_engine(config, tmp_path / "mxfp4", "bfloat16")
    weights = dict(engine.named_weights())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    export_pretrained(tmp_path / "exported", weights.items(), config, 0)
    again = forward_engine(
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config, tmp_path / "exported", "bfloat16"
    )
    assert all(torch.equal(weight, expected[name]) for name, weight in again.named_weights())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    engine.close()
    again.close()


def peak_bytes(load: Callable[[], None]) -> int:
    """Most bytes that torch held at a time in `load`, files that it mapped included, what was there before not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        load()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


QUANTISED = {"GPT-OSS-20B": mxfp4_folder, "DeepSeek-V3": fp8_folder}


@pytest.mark.parametrize("name", ["Mixtral-8x7B", *QUANTISED])
def test_loading_needs_less_than_a_unit_besides_the_arenas(name: str, tmp_path: Path):
    """Merged experts, and dequantised ones, are the largest part of a unit: no copy of them may exist."""
    config = family_config(name, hidden_size=512, intermediate_size=512, moe_intermediate_size=512)
    if name in QUANTISED:
        QUANTISED[name](tmp_path / "hub", config)
    else:
        plain_model(config).save_pretrained(tmp_path / "hub")
    engine = StreamingEngine(config, StreamingConfig(dtype="bfloat16"), None, device="cpu")
    unit = max(engine.plan.layer_sizes) * 2
    mapped = (tmp_path / "hub" / "model.safetensors").stat().st_size
    peak = peak_bytes(lambda: engine.load_weights(tmp_path / "hub"))
    assert mapped <= peak < mapped + unit
    engine.close()

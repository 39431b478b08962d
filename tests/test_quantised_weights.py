"""Quantised checkpoints: the values that transformers gives them, and the way into the arenas and out again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatrain_verl.streaming.checkpoint import export_pretrained
from megatrain_verl.streaming.model_plan import plan_model
from megatrain_verl.streaming.quantised_weights import check_quantization, dequantise_fp8, stored_weights
from megatrain_verl.streaming.weight_files import load_into
from megatrain_verl.streaming.weight_folder import WeightFolder
from tests.oracle import plain_model, tiny_config
from tests.test_weight_files import make_state

BLOCK = [16, 24]  # 24 does not divide the hidden size: the last block of a row is cut off


def dequantised(quantised: Tensor, factors: Tensor, rows: int, columns: int) -> Tensor:
    return torch.cat([part.reshape(-1) for _, part in dequantise_fp8(quantised, factors, rows, columns)]).view(
        quantised.shape
    )


def random_fp8(*shape: int) -> Tensor:
    return torch.randn(shape).clamp_(-400, 400).to(torch.float8_e4m3fn)


def test_fp8_values_are_those_of_transformers():
    torch.manual_seed(0)
    quantised, factors = random_fp8(3, 256, 384), torch.rand(3, 2, 3)
    expected = Fp8Dequantize(None)._dequantize_one(quantised, factors)
    assert expected.dtype is torch.float32
    assert torch.equal(dequantised(quantised, factors, 128, 128), expected)


def test_fp8_blocks_at_the_border_are_cut_off():
    """DeepSeek-V3's kv_a_proj has 576 rows: four blocks of 128 and a half; every number gets its own block's factor."""
    torch.manual_seed(0)
    quantised, factors = random_fp8(576, 200), torch.rand(5, 2)
    rows, columns = torch.arange(576) // 128, torch.arange(200) // 128
    assert torch.equal(dequantised(quantised, factors, 128, 128), quantised.float() * factors[rows][:, columns])


def write_folder(folder: Path, weights: dict[str, Tensor], config: dict) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mxfp4_values_are_those_of_transformers(tmp_path: Path):
    torch.manual_seed(0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (3, 20, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 20, 2), dtype=torch.uint8)
    weights = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 20)}
    folder = write_folder(tmp_path / "model", weights, {"quantization_config": {"quant_method": "mxfp4"}})
    with WeightFolder(folder) as files:
        stored = {weight.header.name: weight for weight in stored_weights(files)}
        assert stored.keys() == {name, f"{name}_bias"}
        parts = list(stored[name].parts())
    expected = convert_moe_packed_tensors(blocks, scales)
    assert stored[name].header.shape == expected.shape == (3, 64, 20)
    assert [start for start, _ in parts] == [0, 64 * 20, 2 * 64 * 20]
    assert torch.equal(torch.stack([part for _, part in parts]), expected)


@pytest.fixture
def fp8_folder(tmp_path: Path) -> tuple[Qwen3Config, dict[str, Tensor], Path]:
    """A tiny model whose projections are FP8, its config, and the weights that it stands for."""
    config = tiny_config("qwen3", layers=2)
    plain_model(config).save_pretrained(tmp_path / "plain")
    weights, expected = {}, {}
    for name, weight in load_file(tmp_path / "plain" / "model.safetensors").items():
        weights[name] = expected[name] = weight.bfloat16()
        if name.endswith("_proj.weight"):
            grid = [-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True)]
            weights[name] = weight.to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = torch.rand(grid) + 0.5
            expected[name] = dequantised(weights[name], weights[f"{name}_scale_inv"], *BLOCK)
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": BLOCK}
    return config, expected, write_folder(tmp_path / "fp8", weights, config.to_dict())


def test_fp8_folder_loads_is_exported_in_bfloat16_and_loads_again(fp8_folder: tuple, tmp_path: Path):
    config, expected, folder = fp8_folder
    plan = plan_model(config)
    state = make_state(plan)
    load_into(state, plan, folder)
    for unit, span in state.parameters():
        master = unit.master(span.offset, span.offset + span.numel).view(span.shape)
        assert torch.equal(master, expected[span.name].float()), span.name

    named = [(span.name, unit.view(unit.weight, span)) for unit, span in state.parameters()]
    export_pretrained(tmp_path / "exported", named, config, 0)
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert "quantization_config" not in exported
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto")
    assert again.dtype is torch.bfloat16
    second = make_state(plan)
    load_into(second, plan, tmp_path / "exported")
    for (unit, span), (other, _) in zip(state.parameters(), second.parameters(), strict=True):
        assert torch.equal(other.view(other.weight, span), unit.view(unit.weight, span))
        assert torch.equal(again.get_parameter(span.name), unit.view(unit.weight, span))


@pytest.mark.parametrize(
    "change, message",
    [
        (None, r"quantised: {name} \(F8_E4M3\)"),
        (torch.ones(1, 1), r"quantised: {name} \(F8_E4M3\).*1 unknown: {name}_scale_inv"),
    ],
)
def test_fp8_weights_without_fitting_factors_are_refused(fp8_folder: tuple, change: Tensor | None, message: str):
    config, _, folder = fp8_folder
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(folder / "model.safetensors")
    del weights[f"{name}_scale_inv"]
    if change is not None:
        weights[f"{name}_scale_inv"] = change
    save_file(weights, folder / "model.safetensors")
    plan = plan_model(config)
    state = make_state(plan)
    with pytest.raises(ValueError, match=message.format(name=name)):
        load_into(state, plan, folder)
    assert not any(unit.weight.any() for unit in state.units)


@pytest.mark.parametrize(
    "quantization, named",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8 without weight_block_size"),
    ],
)
def test_other_quantisation_methods_are_refused_by_name(quantization: dict, named: str, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"quantised \({named}\).*dequantise it first"):
        check_quantization(quantization)
    config = tiny_config("qwen3")
    folder = write_folder(tmp_path / "model", {"x": torch.ones(1)}, {"quantization_config": quantization})
    plan = plan_model(config)
    with pytest.raises(ValueError, match=rf"quantised \({named}\)"):
        load_into(make_state(plan), plan, folder)

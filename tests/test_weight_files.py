"""Loading Hugging Face folders that transformers itself wrote, and refusing what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.host_store import ParameterState
from megatrain_verl.streaming.model_plan import ModelPlan, plan_model
from megatrain_verl.streaming.weight_files import load_into
from megatrain_verl.streaming.weight_folder import read_weights
from tests.families.configs import family_config
from tests.oracle import plain_model, tiny_config


def make_state(plan: ModelPlan, *, trainable: bool = True, **settings: object) -> ParameterState:
    config = StreamingConfig(**settings)
    return ParameterState.allocate(plan, config, trainable=trainable, reference=False, register=False)


def check_equal(state: ParameterState, model: nn.Module) -> None:
    """Every master of `state` is the parameter of `model`, bit for bit."""
    expected = dict(model.named_parameters())
    assert {span.name for _, span in state.parameters()} == set(expected)
    for unit, span in state.parameters():
        master = unit.master(span.offset, span.offset + span.numel).view(span.shape)
        assert torch.equal(master, expected[span.name].float()), span.name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[ModelPlan, nn.Module, Path]:
    """An untied tiny model with its folder, in several shards."""
    model = plain_model(tiny_config("qwen2"))
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    return plan_model(tiny_config("qwen2")), model, tmp_path / "model"


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """The folder's weights in one file beside it, some replaced, added or (None) left out."""
    weights = dict(read_weights(folder)) | change
    other = folder.with_name("changed")
    other.mkdir()
    kept = {name: tensor.contiguous() for name, tensor in weights.items() if tensor is not None}
    save_file(kept, other / "model.safetensors")
    return other


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shards_load_bit_equal(saved: tuple, dtype: str) -> None:
    plan, model, folder = saved
    state = make_state(plan, dtype=dtype)
    load_into(state, plan, folder)
    check_equal(state, model)


def test_half_precision_files_load_exactly(tmp_path: Path) -> None:
    plan = plan_model(tiny_config("llama"))
    for dtype in (torch.bfloat16, torch.float16):
        model = plain_model(tiny_config("llama")).to(dtype)
        model.save_pretrained(tmp_path / str(dtype))
        state = make_state(plan)
        load_into(state, plan, str(tmp_path / str(dtype)))
        check_equal(state, model)


def test_names_of_the_base_model_load(saved: tuple) -> None:
    plan, model, _ = saved
    state = make_state(plan)
    load_into(state, plan, ((name.removeprefix("model."), tensor) for name, tensor in model.named_parameters()))
    check_equal(state, model)


def test_buffers_of_old_llama_files_are_ignored(saved: tuple) -> None:
    plan, model, folder = saved
    state = make_state(plan)
    load_into(state, plan, rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    check_equal(state, model)


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight"], ["both", "lm_head.weight"]])
def test_tied_weight_loads_under_each_of_its_names(names: list[str]) -> None:
    config = tiny_config("qwen2", tied=True)
    plan, model = plan_model(config), plain_model(config)
    weights = dict(model.named_parameters())
    embedding = weights["model.embed_tokens.weight"]
    if names[0] != "both":
        del weights["model.embed_tokens.weight"]
    weights[names[-1]] = embedding
    state = make_state(plan)
    load_into(state, plan, weights.items())
    check_equal(state, model)


@pytest.mark.parametrize("trainable", [True, False])
def test_untied_files_of_a_tied_config_are_refused(trainable: bool) -> None:
    config = tiny_config("qwen2", tied=True)
    plan, model = plan_model(config), plain_model(config)
    weights = dict(model.state_dict())
    load_into(make_state(plan, trainable=trainable), plan, weights.items())  # equal values under both names are fine
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    weights["lm_head.weight"][-1, -1] += 0.5
    with pytest.raises(ValueError, match="ties model.embed_tokens.weight and lm_head.weight, .* different values"):
        load_into(make_state(plan, trainable=trainable), plan, weights.items())


NORM, MATRIX = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
FAULTS = {
    "missing": ({NORM: None}, f"1 missing: {NORM}; do config.json"),
    "unknown": ({"model.layers.0.router.weight": torch.ones(2)}, "1 unknown: model.layers.0.router.weight"),
    "shape": ({MATRIX: torch.ones(32, 64)}, rf"1 of another shape: {MATRIX} \(32, 64\) instead of \(64, 32\)"),
    "flattened": ({MATRIX: torch.ones(64 * 32)}, r"of another shape: .*\(2048,\) instead of \(64, 32\)"),
    "int8": ({MATRIX: torch.ones(64, 32, dtype=torch.int8)}, rf"quantised: {MATRIX} \(I8\); .*dequantise"),
    "fp8": ({MATRIX: torch.ones(64, 32).to(torch.float8_e4m3fn)}, rf"quantised: {MATRIX} \(F8_E4M3\); .*dequantise"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_are_refused_before_anything_is_read(saved: tuple, fault: str) -> None:
    plan, _, folder = saved
    change, message = FAULTS[fault]
    state = make_state(plan)
    with pytest.raises(ValueError, match=f"do not fit the qwen2 model: .*{message}"):
        load_into(state, plan, rewrite(folder, change))
    assert not any(unit.weight.any() for unit in state.units)


@pytest.mark.parametrize("fault", FAULTS)
def test_pairs_that_do_not_fit_are_refused(saved: tuple, fault: str) -> None:
    plan, model, _ = saved
    change, message = FAULTS[fault]
    weights = {name: tensor for name, tensor in (dict(model.named_parameters()) | change).items() if tensor is not None}
    message = message.replace("I8", "int8").replace("F8_E4M3", "float8_e4m3fn")
    with pytest.raises(ValueError, match=f"do not fit the qwen2 model: .*{message}"):
        load_into(make_state(plan), plan, weights.items())


@pytest.mark.parametrize("second", [NORM, "norm.weight"])
def test_a_parameter_given_twice_is_refused(saved: tuple, second: str) -> None:
    plan, model, _ = saved
    pairs = [*model.named_parameters(), (second, torch.ones(32))]
    with pytest.raises(ValueError, match=f"1 given twice: {second}"):
        load_into(make_state(plan), plan, pairs)


@pytest.mark.parametrize("merged_first", [True, False])
def test_experts_apart_and_merged_are_refused(merged_first: bool) -> None:
    config = family_config("Qwen3-30B-A3B")
    plan, model = plan_model(config), plain_model(config)
    merged = dict(model.named_parameters())
    name = next(name for name in merged if name.endswith(".experts.down_proj"))
    parts = list(plan.hub.export(name, merged.pop(name).detach()))
    whole = [(name, model.get_parameter(name))]
    assert len(parts) > 1
    load_into(make_state(plan), plan, [*merged.items(), *parts])
    pairs = [*merged.items(), *(whole + parts[:1] if merged_first else parts + whole)]
    with pytest.raises(ValueError, match=f"1 given twice: {parts[0][0] if merged_first else name}"):
        load_into(make_state(plan), plan, pairs)


def test_pairs_may_be_strided() -> None:
    """A parameter, and a buffer of the layers (the router's bias)."""
    config = family_config("DeepSeek-V3")
    plan, model = plan_model(config), plain_model(config)
    strided = {name: torch.stack([value, value], dim=-1)[..., 0] for name, value in model.state_dict().items()}
    assert not any(value.is_contiguous() for value in strided.values())
    state = make_state(plan)
    load_into(state, plan, strided.items())
    check_equal(state, model)
    for unit in state.units:
        for name, buffer in unit.buffers.items():
            assert torch.equal(buffer, model.state_dict()[name])


def test_only_the_first_names_are_shown(saved: tuple) -> None:
    plan = saved[0]
    with pytest.raises(ValueError, match=r"\d\d missing: ([\w.]+, ){5}\.\.\.;"):
        load_into(make_state(plan), plan, [])


def test_folder_faults_are_named(saved: tuple, tmp_path: Path) -> None:
    folder = saved[2]
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        list(read_weights(tmp_path / "nowhere"))

    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=f"{shard.name} is damaged or incomplete"):
        list(read_weights(folder))
    shard.unlink()
    with pytest.raises(ValueError, match=rf"lacks {shard.name} of its \d+ shards"):
        list(read_weights(folder))

    index = folder / "model.safetensors.index.json"
    for text in ("{", "[]", json.dumps({"metadata": {}})):
        index.write_text(text)
        with pytest.raises(ValueError, match="index.json is not a safetensors index"):
            list(read_weights(folder))
    index.unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        list(read_weights(folder))


def test_pickled_weights_are_refused_with_the_conversion(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled weights only \(pytorch_model.bin\).*save_pretrained"):
        list(read_weights(tmp_path))


def test_read_weights_yields_what_the_files_hold(saved: tuple) -> None:
    folder = saved[2]
    expected = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    read = dict(read_weights(folder))
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)

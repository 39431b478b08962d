"""The plan on the command line, against published figures and the plan that the engine checks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GptOssConfig, Llama4Config, Llama4TextConfig, Llama4VisionConfig, Qwen2Config

from megatrain_verl.config import StreamingConfig
from megatrain_verl.model_sizes import ModelSizes
from megatrain_verl.resources import HostPlan, check_spill
from megatrain_verl.resources_report import command_line, parse_size, read_sizes, report
from megatrain_verl.streaming.device_plan import device_bytes
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle

QWEN_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megatrain_verl.resources", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_counts_are_the_published_ones():
    assert ModelSizes.of(QWEN_7B).num_parameters == 7_615_616_512
    moe = ModelSizes.of(GptOssConfig())  # the 120B model: 116.8 billion parameters, 5.1 active without the embedding
    assert moe.num_parameters == 116_829_156_672
    assert moe.active_parameters - moe.edge_sizes[0] == pytest.approx(5.1e9, rel=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_from_a_config_give_the_plan_that_the_engine_checks(tied):
    config = oracle.tiny_config("qwen2", tied=tied, hidden_size=128, intermediate_size=256, vocab_size=512)
    sizes, plan = ModelSizes.of(config), plan_model(config)
    assert sizes.num_parameters == plan.num_parameters
    settings = StreamingConfig()
    ours, checked = (HostPlan.of(model, settings, trainable=True, reference=True).total for model in (sizes, plan))
    assert ours == pytest.approx(checked, rel=0.05)  # the plan also counts alignment
    assert sum(device_bytes(sizes, settings, 64, 64).values()) == pytest.approx(
        sum(device_bytes(plan, settings, 64, 64).values()), rel=0.05
    )


def test_command_line_says_what_fits_and_what_to_change(tmp_path: Path):
    QWEN_7B.save_pretrained(tmp_path)
    arguments = ("--model", str(tmp_path), "--reference", "--rollout", "vllm")
    fits = run(*arguments, "--host-memory", "256GiB", "--json")
    assert fits.returncode == 0, fits.stderr
    result = json.loads(fits.stdout)
    assert result["fits"] == {"gpu": True, "host": True} and result["what_to_change"] == []
    assert result["host_bytes"]["total"] == pytest.approx(16 * 7_615_616_512, rel=0.01)
    short = run(*arguments, "--host-memory", "64GB")
    assert short.returncode == 1
    assert "host NO" in short.stdout and "without a KL term: 14.2 GiB less" in short.stdout
    assert "with reference_folder, one GPU: 12.2 GiB less host memory" in short.stdout
    undecided = run(*arguments)
    assert undecided.returncode == 0 and "host depends on --host-memory" in undecided.stdout
    assert "needs: a host with 128 GB of free memory, a GPU with" in undecided.stdout
    small = run(*arguments, "--gpu-memory", "8GB", "--seq-len", "32768")
    assert small.returncode == 1 and "GPU NO" in small.stdout and "GPU memory: lower --seq-len" in small.stdout
    unknown = run("--model", str(tmp_path / "absent"))
    assert unknown.returncode == 2 and "no config.json" in unknown.stderr


def test_reference_in_a_file_takes_two_buffers_of_the_embedding(tmp_path: Path):
    QWEN_7B.save_pretrained(tmp_path)
    model = ["--model", str(tmp_path)]
    plain, in_file = (
        report(command_line().parse_args([*model, *options])) for options in ([], ["--reference-folder", "/disk"])
    )
    assert in_file["host_bytes"]["total"] - plain["host_bytes"]["total"] == 2 * 2 * (152064 * 3584 + 3584)
    assert plain["what_to_change"] == []
    assert in_file["what_to_change"] == ["reference_folder: 14.2 GiB on the disk, which every reference pass reads"]
    with pytest.raises(ValueError, match="the model without adapters is the reference"):
        report(command_line().parse_args([*model, "--reference-folder", "/disk", "--lora-rank", "8"]))


@pytest.mark.parametrize(
    "text, size", [("80GB", 80 * 10**9), ("512 GiB", 512 << 30), ("1.5TB", 1500 * 10**9), ("7", 7)]
)
def test_sizes_are_read_with_units(text, size):
    assert parse_size(text) == size
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text + "x!")


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--gpu-memory", "80XB", "'80XB' is not a size; write 80GB"),
        ("--host-memory", "1.2.3GB", "'1.2.3GB' is not a size; write 80GB"),
        ("--seq-len", "0", "'0' is not a number of tokens"),
        ("--micro-batch-tokens", "-5", "'-5' is not a number of tokens"),
        ("--tokens-per-step", "1e6", "'1e6' is not a number of tokens"),
    ],
)
def test_values_that_cannot_be_are_refused_with_what_to_write(option, value, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line().parse_args(["--model", "M", f"{option}={value}"])
    assert f"argument {option}: {message}" in capsys.readouterr().err


def test_family_with_its_own_code_is_sized_as_a_llama(tmp_path: Path):
    """Baichuan2-7B, whose published parameter count this is."""
    shape = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32}
    config = {"model_type": "baichuan", "vocab_size": 125696, "tie_word_embeddings": False, **shape}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes, model_type = read_sizes(str(tmp_path))
    assert (sizes.num_parameters, model_type) == (7_505_973_248, "baichuan")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "baichuan", **shape}))
    with pytest.raises(ValueError, match="does not know model_type 'baichuan' .* it has no vocab_size"):
        read_sizes(str(tmp_path))


def test_120b_on_one_80_gb_card(tmp_path: Path):
    GptOssConfig().save_pretrained(tmp_path)
    run_120b = run("--model", str(tmp_path), "--gpu-memory", "80GB", "--rollout", "vllm", "--reference", "--json")
    assert run_120b.returncode == 0, run_120b.stderr
    result = json.loads(run_120b.stdout)
    assert result["fits"] == {"gpu": True, "host": None}
    assert result["host_bytes"]["total"] == pytest.approx(16 * 116_829_156_672, rel=0.01)
    assert any("vLLM awake: 234 GB of bfloat16 weights do not fit" in advice for advice in result["what_to_change"])


def test_lora_takes_two_bytes_per_frozen_parameter_and_none_for_the_reference():
    arguments = ["--model", "tests/data/configs/Qwen2.5-7B-Instruct", "--reference", "--lora-rank", "16"]
    result = report(command_line().parse_args(arguments))
    adapters = result["trained_parameters"]
    assert adapters == 28 * 16 * (4 * 3584 + 2 * (3584 + 512) + 3 * (3584 + 18944))  # q and o; k and v; gate, up, down
    one = report(command_line().parse_args([*arguments, "--lora-target-modules", "q_proj"]))
    assert one["trained_parameters"] == 28 * 16 * 2 * 3584
    host = result["host_bytes"]
    assert host["weight"] == 2 * (7_615_616_512 + adapters) and "reference" not in host
    assert host["total"] - host["staging"] == host["weight"] + 12 * adapters


CONFIGS = os.environ.get("MODEL_CONFIGS")  # a folder of folders with a config.json each


@pytest.mark.skipif(CONFIGS is None, reason="MODEL_CONFIGS names no folder of configurations")
def test_every_configuration_at_hand_has_a_plan():
    files = sorted(Path(CONFIGS).glob("*/config.json"))
    assert files
    for file in files:
        sizes, _ = read_sizes(str(file.parent))
        assert 0 < sizes.active_parameters <= sizes.num_parameters, file
        assert sum(sizes.unit_sizes) == sizes.num_parameters, file


def test_a_mixture_that_does_not_fit_is_told_in_how_many_parts_it_would(tmp_path):
    GptOssConfig().save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--gpu-memory", "24GB", "--micro-batch-tokens", "4096"]
    arguments += ["--tokens-per-step", "4096"]
    whole = report(command_line().parse_args(arguments))
    assert whole["fits"]["gpu"] is False
    (advice,) = (line for line in whole["what_to_change"] if "expert_parts" in line)
    parts = re.search(r"expert_parts=(\d+) ", advice)[1]
    assert report(command_line().parse_args([*arguments, "--expert-parts", parts]))["fits"]["gpu"] is True
    fewer = report(command_line().parse_args([*arguments, "--expert-parts", str(int(parts) // 2)]))
    assert fewer["fits"]["gpu"] is False and advice in fewer["what_to_change"]
    with pytest.raises(ValueError, match="a layer of this model has 128 experts that can be"):
        report(command_line().parse_args([*arguments, "--expert-parts", "129"]))


def test_llama_4_with_images_has_a_plan_though_it_is_not_trained(tmp_path):
    text = Llama4TextConfig(num_hidden_layers=4, vocab_size=1000)
    vision = Llama4VisionConfig(num_hidden_layers=1)
    Llama4Config(text_config=text.to_dict(), vision_config=vision.to_dict()).save_pretrained(tmp_path)
    sizes, model_type = read_sizes(str(tmp_path))
    assert model_type == "llama4" and sizes.layer_sizes == ModelSizes.of(text).layer_sizes
    assert sum(sizes.unit_sizes) == sizes.num_parameters > ModelSizes.of(text).num_parameters


def test_parts_are_not_named_for_experts_that_cannot_be_streamed_apart(tmp_path):
    Llama4TextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--gpu-memory", "24GB", "--micro-batch-tokens", "4096"]
    whole = report(command_line().parse_args(arguments))
    assert whole["fits"]["gpu"] is False and not any("expert_parts" in line for line in whole["what_to_change"])
    with pytest.raises(ValueError, match="a layer of this model has no experts that can be streamed apart"):
        report(command_line().parse_args([*arguments, "--expert-parts", "2"]))


@pytest.mark.parametrize("parts, named", [("1", True), ("8", False)])
def test_no_checkpoint_interval_is_named_beside_parts_which_exclude_it(tmp_path, parts, named):
    GptOssConfig().save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--gpu-memory", "60GB", "--expert-parts", parts, "--seq-len", "8192"]
    result = report(command_line().parse_args([*arguments, "--tokens-per-step", "4000000"]))
    (advice,) = (line for line in result["what_to_change"] if "kept layer inputs" in line)
    assert ("checkpoint_interval=2" in advice) == named
    plan = HostPlan({"weight": 0}, 1)
    config = StreamingConfig(expert_parts=int(parts), host_memory_gb=1.0)
    with pytest.raises(ValueError, match="layer inputs of this step need 2.00 GiB") as refused:
        check_spill(config, plan, 2 << 30)
    assert ("checkpoint_interval=2" in str(refused.value)) == named

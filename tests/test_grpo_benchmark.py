"""The GRPO benchmark: its inputs, its arithmetic, and the benchmark itself with real vLLM."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpo_timeline
import pandas as pd
import pytest
import torch
from grpo import gpu_memory, inputs, report, training
from grpo.options import Workload, overrides
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
WORK = Workload(
    prompts=2, n=2, prompt_len=48, response_len=16, steps=2, warm_up=1, kl_reference=True, micro_batch_tokens=1024,
    gpu_memory_utilization=0.5, enforce_eager=True, trainer="megatrain", hardware="cpu",
)  # fmt: skip


def test_inputs_are_a_model_that_loads_and_prompts_of_one_length(tmp_path: Path) -> None:
    tokenizer = inputs.make_model(tmp_path / "model", "tiny", 1)
    inputs.make_prompts(tmp_path / "prompts.parquet", tokenizer, 5, 40)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(loaded) == model.config.vocab_size == 512
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    prompts = pd.read_parquet(tmp_path / "prompts.parquet")["prompt"]
    lengths = {len(loaded.apply_chat_template(list(chat), add_generation_prompt=True)["input_ids"]) for chat in prompts}
    assert lengths == {40} and len({chat[0]["content"] for chat in prompts}) == 5
    with pytest.raises(ValueError, match="needs more than the .* tokens of the chat template"):
        inputs.make_prompts(tmp_path / "prompts.parquet", tokenizer, 5, 10)


def test_weights_of_several_shards_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "SHARD_BYTES", 40_000)
    inputs.make_model(tmp_path, "tiny", 2)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = dict(inputs.random_weights(model.config, "cpu"))
    assert all(torch.equal(weight, expected[name]) for name, weight in model.named_parameters())


def test_device_memory_is_told_apart_by_phase() -> None:
    samples = gpu_memory.parse(
        "2026/11/30 01:00:00.000, 10\n2026/11/30 01:00:01.500, 30\n2026/11/30 01:00:02.000, 20\n2026"
    )
    start = samples[0][0]
    assert [round(moment - start, 3) for moment, _ in samples] == [0, 1.5, 2]
    assert gpu_memory.peaks(samples, [("score", start + 1, start + 1.7)]) == {
        "rollout": 20 << 20, "score": 30 << 20,
    }  # fmt: skip


def step(seconds: float, **more: float) -> dict[str, Any]:
    timing = {"gen": 2.0, "old_log_prob": 0.5, "update_actor": 1.0, "update_weights": 0.25, "step": seconds}
    data = {f"timing_s/{name}": value for name, value in timing.items()}
    data |= {"training/rollout_probs_diff_max": 0.01, "actor/perf/cpu_memory_used_gb": 5.0}
    data |= {"response_length/min": 16.0, "response_length/max": 16.0, "actor/megatrain/export_s": 0.2}
    return data | more


def test_report_leaves_the_warm_up_out(tmp_path: Path) -> None:
    lines = [{"step": i, "data": step(seconds)} for i, seconds in enumerate((50.0, 4.0, 5.0), 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = report.summarize(WORK, tmp_path, [], 0.0) | {"model": "tiny"}
    assert result["seconds"]["step"] == 4.5 and result["seconds"]["gen"] == 2.0
    assert result["seconds"]["other"] == pytest.approx(4.5 - 3.75)
    assert result["tokens_per_s"] == pytest.approx(4 * 64 / 4.5) and result["generated_tokens_per_s"] == 4 * 16 / 2
    assert result["engine"] == {"export_s": 0.2}
    assert "step 4.50 s" in report.table(result)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match="has 1 steps instead of 3"):
        report.summarize(WORK, tmp_path, [], 0.0)


def test_verls_phases_are_drawn_around_the_engines() -> None:
    trace = [
        {"phase": "export", "start": 10.0, "seconds": 0.1},
        {"phase": "score", "start": 13.1, "seconds": 0.2},
        {"phase": "forward_backward", "start": 13.7, "seconds": 0.5},
        {"phase": "optimizer_step", "start": 14.2, "seconds": 0.1},
        {"phase": "adamw", "start": 14.3, "seconds": 0.1},
        {"phase": "export", "start": 14.6, "seconds": 0.1},
    ]
    phases, adamw = grpo_timeline.engine_spans(trace, 1)
    assert [name for name, *_ in phases] == ["score", "forward_backward", "optimizer_step", "export"]
    assert adamw == [("adamw", 14.3, 14.4)]
    seconds = {"gen": 2.0, "old_log_prob": 0.5, "update_actor": 1.0, "update_weights": 0.25}
    spans = grpo_timeline.verl_spans({f"timing_s/{name}": value for name, value in seconds.items()}, phases)
    assert [name for name, *_ in spans] == list(seconds)
    around = {name: (start, end) for name, start, end in spans}
    inside = {name: (start, end) for name, start, end in phases}
    for outer, inner in (("old_log_prob", "score"), ("update_actor", "forward_backward"), ("update_weights", "export")):
        assert around[outer][0] <= inside[inner][0] and inside[inner][1] <= around[outer][1]
    with pytest.raises(ValueError, match="has steps 1 to 1, not 2"):
        grpo_timeline.engine_spans(trace, 2)


def test_devices_are_checked_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="names 1 more than once"):
        training.check_devices(["1", "0", "1"], "cpu")
    with pytest.raises(ValueError, match=r"4 sequences .* among 3 devices"):
        dataclasses.replace(WORK, ranks=3)
    settings = overrides(dataclasses.replace(WORK, ranks=2), Path("run"))
    assert "trainer.n_gpus_per_node=2" in settings and "ray_kwargs.ray_init.num_gpus=2" in settings


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", ["0", "0,1"])
def test_the_benchmark_runs_verls_trainer(tmp_path: Path, devices: str) -> None:
    command = [sys.executable, "benchmarks/grpo_step.py", "--model", "tiny", "--device", "cpu", "--kl-reference"]
    command += ["--devices", devices]
    command += ["--prompts", "2", "--n", "2", "--prompt-len", "48", "--response-len", "16", "--steps", "2"]
    command += ["--folder", str(tmp_path / "run"), "--json", str(tmp_path / "result.json"), "--time-limit", "800"]
    command += ["actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16"]
    subprocess.run(command, cwd=ROOT, check=True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["response_lengths"] == [16.0] and result["rollout_probs_diff_max"] < 1e-6
    assert set(result["seconds"]) == {
        "gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "other", "step",
    }  # fmt: skip
    assert 0 < result["engine"]["export_s"] < result["seconds"]["update_weights"]
    assert len(result["steps"]) == 3

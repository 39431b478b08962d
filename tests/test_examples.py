"""The examples: model conversion, GSM8K, progress, preflight, and clean-up."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pandas as pd
import preflight
import prepare_gsm8k
import psutil
import pytest
import torch
from gguf_weights import convert, hf_name
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted(ROOT.glob("examples/*.sh")), ROOT / "tests/run.sh", ROOT / ".ci/run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_valid_bash(script):
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.11.attn_q.weight", "model.layers.11.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_gguf_names(name, expected):
    assert hf_name(name) == expected


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_inp.weight", "blk.0.attn_q"])
def test_a_tensor_that_is_not_of_llama_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        hf_name(name)


def test_gguf_model_equals_the_one_it_was_written_from(tmp_path):
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    write_gguf(model, tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "out", eos_token="<|im_end|>", chat_template="{{ messages }}")
    model.save_pretrained(tmp_path / "original")
    original, converted = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("original", "out"))
    ids = torch.arange(40)[None]
    torch.testing.assert_close(converted(ids).logits, original(ids).logits, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token_id, converted.config.eos_token_id) == (259, 259)
    ids = tokenizer("abc 12<|im_end|>").input_ids
    assert len(ids) == 6  # ab, c, space, 1, 2, <|im_end|>
    assert tokenizer.decode(ids) == "abc 12<|im_end|>"


def write_gguf(model, path):
    """`model` as llama.cpp's converter writes it: float32, its names, and interleaved halves of q and k."""
    writer = gguf.GGUFWriter(path, "llama")
    config, heads = model.config, model.config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(258)  # wrong on purpose: such files exist
    plain = [*sorted(ByteLevel.alphabet()), "ab"]
    writer.add_token_list([*plain, "<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    writer.add_token_types([1] * len(plain) + [3] * 3)
    writer.add_token_merges(["a b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        for part, count in (("q_proj", heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gsm8k_rows(tmp_path):
    problem = {"question": "How many?", "answer": "1,000 + 234 = 1,234\n#### 1,234"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(problem) + "\n" + json.dumps(problem) + "\n")
    prepare_gsm8k.main(tmp_path / "out", tmp_path)
    rows = pd.read_parquet(tmp_path / "out" / "train.parquet")
    assert len(rows) == 2
    row = rows.iloc[1]
    assert row["reward_model"]["ground_truth"] == "1234"
    assert row["data_source"] == "openai/gsm8k"
    assert row["prompt"][0]["content"].startswith("How many? Let's think step by step")


@pytest.mark.parametrize("line", ["{", "[]", '{"question": "?"}'])
def test_a_bad_gsm8k_line_is_named(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "?", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{path}, line 2"):
        prepare_gsm8k.read_jsonl(path)


def test_a_gsm8k_answer_without_mark_is_refused():
    with pytest.raises(ValueError, match="test problem 3 has no ####"):
        prepare_gsm8k.row({"question": "?", "answer": "42"}, "test", 3)


def test_progress_shows_steps_and_logs_everything(tmp_path):
    noise = "\x1b[36m(pid=7)\x1b[0m a warning\n"
    bar = "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m Training Progress:  50%|##   | 1/2\rTraining Progress: 100%|####| 2/2\n"
    step = (
        "\x1b[36m(TaskRunnerV1 pid=7)\x1b[0m step:2 - actor/kl_loss:1e-05 - critic/rewards/mean:np.float64(0.5) - x:y\n"
    )
    sft = "step:3 - train/loss:2.25 - train/grad_norm:57.05 - train/lr:2e-05\n"
    command = [sys.executable, ROOT / "examples/progress.py", tmp_path / "log"]
    result = subprocess.run(command, input=noise + bar + step + sft, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "50%|##   | 1/2",
        "100%|####| 2/2",
        "step 2: reward 0.5, KL loss 1e-05",
        "step 3: loss 2.25, gradient norm 57",
    ]
    assert (tmp_path / "log").read_text() == noise + bar.replace("\r", "\n") + step + sft


@pytest.fixture
def model_folder(tmp_path):
    LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=2).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    return tmp_path / "model"


def test_preflight_names_what_is_missing(tmp_path, model_folder):
    assert "package no_such_package is not installed: bash examples/install.sh" in one(
        preflight.missing_packages(("json", "no_such_package"))
    )
    assert f"no model in {tmp_path}" in one(preflight.missing_model(tmp_path))
    assert not list(preflight.missing_model(model_folder))
    (model_folder / "model.safetensors").unlink()
    assert f"no weights in {model_folder}" in one(preflight.missing_model(model_folder))
    files = {"TRAIN_FILE": str(model_folder / "config.json"), "TEST_FILE": [str(tmp_path / "no.parquet")]}
    problem = one(preflight.missing_data(files))
    assert f"{tmp_path}/no.parquet" in problem and "prepare_gsm8k.py" in problem and "TEST_FILE" in problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_preflight_names_the_missing_gpu():
    assert "CUDA_VISIBLE_DEVICES" in one(preflight.missing_gpu())


def test_preflight_weighs_the_reference(model_folder):
    """38.0M parameters: 14 bytes each 0.53 GB, 16 with the reference 0.61 GB; and some staging memory, and 5%."""

    def problems(gb, reference, **options):
        engine = {"host_memory_gb": gb * 1e9 / 2**30, "cpu_threads": 1, "_target_": "ignored", **options}
        return list(preflight.missing_memory(model_folder, engine, reference))

    assert not problems(0.75, reference=True)
    assert not problems(0.63, reference=False)
    problem = one(problems(0.63, reference=True))
    assert "more memory" in problem and "use_kl_loss=False" in problem and "\n" not in problem
    assert "algorithm.use_kl_in_reward=False" in problem  # either term needs the reference
    assert "megatrain.reference_folder" in problem
    assert "reference" not in one(problems(0.3, reference=True, reference_folder="/disk"))
    assert "use_kl_loss" not in one(problems(0.3, reference=False))


def one(problems):
    (problem,) = problems
    return problem


def test_preflight_stops_the_7b_script_before_anything_starts(tmp_path, model_folder):
    script = ["bash", ROOT / "examples/run_qwen2_5_7b_grpo.sh", "actor_rollout_ref.actor.megatrain.host_memory_gb=0.1"]
    files = {"TRAIN_FILE": str(model_folder / "config.json"), "TEST_FILE": str(tmp_path / "no.parquet")}
    environment = {**os.environ, **files, "MODEL_PATH": str(model_folder), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    problems = [line for line in result.stderr.splitlines() if line.startswith("preflight: ")]
    assert [problem.split(":")[1].split("/")[0].strip() for problem in problems] == [
        "no GPU",
        "no data file",
        "host memory",
    ]
    assert result.stdout == ""


STRAY = (
    "import subprocess, sys, time; print(subprocess.Popen({command}, start_new_session=True).pid, flush=True); {then}"
)
SLEEPER = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def bounded(seconds, then):
    """A command that starts a process in a session of its own, which ignores SIGTERM, and then does `then`."""
    command = [sys.executable, "-c", STRAY.format(command=SLEEPER, then=then)]
    return [sys.executable, ROOT / "examples/bounded_run.py", str(seconds), *command]


@pytest.mark.parametrize(("seconds", "then", "status"), [(100, "sys.exit(3)", 3), (6, "time.sleep(600)", 124)])
def test_a_bounded_run_leaves_no_process(seconds, then, status):
    result = subprocess.run(bounded(seconds, then), capture_output=True, text=True, timeout=150)
    assert result.returncode == status
    assert not psutil.pid_exists(int(result.stdout))


def test_a_bounded_run_that_is_ended_ends_what_it_started():
    with subprocess.Popen(bounded(600, "time.sleep(600)"), stdout=subprocess.PIPE, text=True) as process:
        stray = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(stray)


SEGMENTS = """
import _multiprocessing, mmap, os, time
file = open("/dev/shm/{name}", "wb+")
file.truncate(4096)
shared = mmap.mmap(file.fileno(), 4096)
semaphore = _multiprocessing.SemLock(1, 1, 1, "/{name}", False)  # no resource tracker removes it
time.sleep(4)
os.kill(os.getpid(), 9)
"""


def test_a_bounded_run_removes_the_shared_memory_of_killed_processes_only():
    name = f"megatrain_test_{os.getpid()}"
    shared, semaphore, others = (Path("/dev/shm", file) for file in (name, f"sem.{name}", f"{name}_others"))
    others.write_bytes(b"x")
    try:
        command = [sys.executable, "-c", SEGMENTS.format(name=name)]
        result = subprocess.run([sys.executable, ROOT / "examples/bounded_run.py", "60", *command], timeout=60)
        assert result.returncode == -signal.SIGKILL % 256
        assert not shared.exists() and not semaphore.exists() and others.exists()
    finally:
        for path in (shared, semaphore, others):
            path.unlink(missing_ok=True)

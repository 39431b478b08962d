"""The quickstart: its data, greedy answers, verdict and plot, and the tiny one from end to end."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import evaluate
import make_data
import make_model
import pandas as pd
import plot
import pytest
import torch
import verdict
from hydra import compose, initialize_config_dir
from reward import digit_share
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

ROOT = Path(__file__).resolve().parent.parent


def test_sums_are_complete_right_and_held_out(tmp_path):
    make_data.write(tmp_path)
    train, test = (pd.read_parquet(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    assert (len(train), len(test)) == (610, 200)
    texts = [messages[0]["content"] for messages in pd.concat([train, test])["prompt"]]
    assert len(set(texts)) == 810
    for text, model in zip(texts, pd.concat([train, test])["reward_model"], strict=True):
        a, b = map(int, text.removesuffix("=").split("+"))
        assert int(model["ground_truth"]) == a + b
    sft = json.loads(
        (tmp_path / json.loads((tmp_path / "dataset_info.json").read_text())["sums"]["file_name"]).read_text()
    )
    answers = {
        messages[0]["content"]: rule["ground_truth"] for messages, rule in train[["prompt", "reward_model"]].values
    }
    assert len(sft) == 320
    assert all(row["output"] == f"#### {answers[row['instruction']]}" for row in sft)  # none is held out


def test_digit_share():
    assert digit_share("", "a1b2", "") == 0.5
    assert digit_share("", "", "") == 0.0


@torch.no_grad()
def test_answers_are_greedy_whatever_they_are_batched_with(tmp_path):
    make_model.make_tiny(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    conversations = [[{"role": "user", "content": text}] for text in ("97+4=", "9+1=", "What is 12 + 5?", "1")]
    rows = pd.DataFrame({"prompt": conversations, "reward_model": [{"ground_truth": "1"}] * 4})
    for messages, row in zip(conversations, evaluate.evaluate(tmp_path, rows), strict=True):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        start = len(ids)
        while len(ids) < start + evaluate.NEW_TOKENS and ids[-1] != tokenizer.eos_token_id:
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert row["prompt"] == messages[0]["content"]
        assert row["response"] == tokenizer.decode(ids[start:], skip_special_tokens=True)


@pytest.mark.parametrize("response, score", [("#### 1", 1.0), ("It is 3. #### 1", 1.0), ("1", 0.0), ("#### 11", 0.0)])
def test_an_answer_needs_the_mark(response, score):
    assert evaluate.scored("0+1=", response, "1")["score"] == score


def answers(folder, name, right, total=20):
    """A file of evaluate.py in which the first `right` of `total` prompts are answered rightly."""
    rows = [{"prompt": f"{index}+1=", "score": float(index < right)} for index in range(total)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def test_p_value_is_that_of_the_sign_test():
    before = {"a": True, "b": True} | {f"gained{index}": False for index in range(8)} | {"never": False, "always": True}
    after = {"a": False, "b": False} | {f"gained{index}": True for index in range(8)} | {"never": False, "always": True}
    assert verdict.p_value(before, after) == (8, 2, pytest.approx(56 / 1024))  # 45 + 10 + 1 of 1024 coins
    assert verdict.p_value(after, before)[2] == pytest.approx(1013 / 1024)
    assert verdict.p_value(after, after) == (0, 0, 1.0)


@pytest.mark.parametrize(
    ("right", "failed"),
    [
        ((0, 5, 10), []),  # five gained, none lost: p = 1/32
        ((0, 4, 10), ["after SFT: 4 sums gained"]),  # p = 1/16
        ((0, 10, 14), ["after GRPO: 4 sums gained"]),
        ((10, 5, 5), ["after SFT: 0 sums gained, 5 lost", "after GRPO: 0 sums gained, 0 lost"]),
    ],
)
def test_verdict_wants_a_significant_gain_of_each_stage(tmp_path, capsys, right, failed):
    files = [answers(tmp_path, f"{index}.jsonl", count) for index, count in enumerate(right)]
    assert verdict.main(files, seconds=61, claim=True) is not bool(failed)
    printed = capsys.readouterr()
    start, sft, grpo = (f"{count / 20:.3f}" for count in right)
    assert printed.out.splitlines()[-1] == (
        f"quickstart: accuracy {start} -> {sft} -> {grpo} (start, after SFT, after GRPO; 20 held-out sums), 61 s"
    )
    complaints = printed.err.splitlines()
    assert len(complaints) == len(failed)
    assert all("FAILED" in line and reason in line for line, reason in zip(complaints, failed, strict=True))
    assert verdict.main(files, seconds=61, claim=False)


@pytest.mark.parametrize(("right", "option", "status"), [(10, [], 1), (20, [], 0), (10, ["--no-claim"], 0)])
def test_verdict_is_the_exit_status(tmp_path, right, option, status):
    files = [answers(tmp_path, f"{index}.jsonl", count) for index, count in enumerate((0, 10, right))]
    command = [sys.executable, ROOT / "examples/quickstart/verdict.py", *files, "--seconds", "61", *option]
    assert subprocess.run(command, capture_output=True).returncode == status


def test_verdict_refuses_answers_to_other_prompts(tmp_path):
    scores = verdict.read(answers(tmp_path, "all.jsonl", 3))
    with pytest.raises(ValueError, match="2 prompts were answered in one stage only"):
        verdict.p_value(scores, verdict.read(answers(tmp_path, "fewer.jsonl", 3, total=18)))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty.jsonl has 0 answers"):
        verdict.read(tmp_path / "empty.jsonl")


def test_plot_has_every_curve(tmp_path):
    rows = [{"step": step, **dict.fromkeys(plot.PANELS, 0.1 * step)} for step in (1, 2, 3)]
    stages = [verdict.read(answers(tmp_path, "answers.jsonl", 7))] * 3
    plot.plot(rows, stages, tmp_path / "quickstart.png")
    assert (tmp_path / "quickstart.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "quickstart.png").stat().st_size < 150_000
    with pytest.raises(ValueError, match="actor/kl_loss"):
        plot.plot([{"step": 1, "critic/rewards/mean": 0.5}], stages, tmp_path / "quickstart.png")


def test_finished_rollouts_are_noticed_at_once():
    """verl builds the sampler that the configuration names; its own waits 2 s at a time."""
    with initialize_config_dir(str(ROOT / "configs/rl"), version_base=None):
        config = compose("quickstart")
    trainer = SimpleNamespace(config=config, trainer_mode="sync", _add_prompts_to_generate=None)
    assert PPOTrainer._build_replay_buffer(trainer).poll_interval == 0.2


def test_two_quickstarts_do_not_write_to_one_folder(tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = subprocess.run(
            quickstart_command(), env=quickstart_environment(tmp_path), capture_output=True, text=True
        )
    assert result.returncode == 1
    assert f"another run writes to {tmp_path}" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]


def quickstart_command():
    return ["bash", ROOT / "examples/run_quickstart.sh", "--tiny"]


def quickstart_environment(output):
    return {**os.environ, "QUICKSTART_OUTPUT": str(output)}


@pytest.mark.ray
@pytest.mark.timeout(700)
def test_tiny_quickstart(tmp_path):
    """From the model to the export, in the environment that the tests run in."""
    earlier = tmp_path / "grpo/global_step_9/actor/huggingface"
    earlier.mkdir(parents=True)  # of a run that went further
    start = time.monotonic()
    with subprocess.Popen(
        quickstart_command(),
        env=quickstart_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # bounded_run.py then ends Ray and vLLM
            output, _ = process.communicate(timeout=60)
    print(output, f"{time.monotonic() - start:.0f} s")
    assert process.returncode == 0, output[-3000:]
    assert re.fullmatch(
        r"quickstart: accuracy 0\.\d{3} -> 0\.\d{3} -> 0\.\d{3} "
        r"\(start, after SFT, after GRPO; 200 held-out sums\), \d+ s",
        output.splitlines()[-1],
    )
    rows = plot.read(tmp_path / "grpo/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["training/rollout_probs_diff_max"] <= 1e-3 for row in rows)
    assert rows[1]["actor/kl_loss"] > 0  # the reference is not the trained policy
    losses = [row["train/loss"] for row in plot.read(tmp_path / "sft/metrics.jsonl")]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert (tmp_path / "quickstart.png").stat().st_size > 1000
    assert not earlier.exists()
    export = tmp_path / "grpo/global_step_3/actor/huggingface"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert model.config.vocab_size == len(tokenizer)

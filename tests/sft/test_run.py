"""`python -m megatrain_verl.sft` as a user runs it: training, reports, checkpoints, resume; equal to a plain loop."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from megatrain_verl.sft.dataset import ChatDataset
from tests.sft.cases import data_config, write_dataset
from tests.sft.runs import ENVIRONMENT, OPTIONS, ROOT, RunServer, assert_same_run, copy_inputs, make_inputs, metrics

pytestmark = pytest.mark.timeout(900)

BATCH, STEPS, LR = 4, 10, 2e-3  # 16 rows are trained on: 4 steps per epoch
SAVED = Path("out") / "global_step_10" / "huggingface"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def straight(folder: Path) -> subprocess.CompletedProcess[str]:
    """The run without interruption, by the command itself."""
    run = subprocess.run(
        [sys.executable, "-m", "megatrain_verl.sft", *OPTIONS],
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=800,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    return run


# --------------------------------------------------------------------------------------------------------- one run


def test_run_learns_and_says_where_the_model_is(straight: subprocess.CompletedProcess[str], folder: Path) -> None:
    losses, evaluated = metrics(folder, "train/loss"), metrics(folder, "val/loss")
    assert sorted(losses) == list(range(1, STEPS + 1)) and sorted(evaluated) == [4, 8, 10]
    assert losses[STEPS] < 0.7 * losses[1] and evaluated[10] < evaluated[4]
    rates = metrics(folder, "train/lr")  # verl reports the rate of the step to come
    assert rates == pytest.approx({step: _cosine(step) for step in losses})
    assert "data set rows: 20 of 20 rows" in straight.stdout
    assert straight.stdout.rstrip().endswith("out/global_step_10/huggingface")


def test_rates_and_time_left_are_in_the_bar_and_in_every_log(
    straight: subprocess.CompletedProcess[str], folder: Path
) -> None:
    time_left, rates = r"\[\d\d:\d\d<\d\d:\d\d, ", r"loss [\d.]+, lr [\d.e+-]+, [\d,]+ tokens/s, [\d.e-]+ TFLOP/s\]"
    assert re.search(rf"Epoch 3/3: .* (9|10)/10 {time_left}.*, {rates}", straight.stdout)
    tokens, rates, flops = (metrics(folder, f"train/{n}") for n in ("global_tokens", "tokens_per_second", "tflops"))
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / "model").parameters())
    for step, rate in rates.items():
        assert flops[step] == pytest.approx(6 * parameters * rate / 1e12)
        assert tokens[step] / rate < 60  # seconds
    (seconds,) = re.findall(r"Total time for train steps: ([\d.]+)s", straight.stdout)
    assert float(seconds) == pytest.approx(sum(tokens[step] / rate for step, rate in rates.items()), abs=0.01)
    assert metrics(folder, "train/total_tokens(B)")[STEPS] == pytest.approx(sum(tokens.values()) / 1e9)
    assert "step:10" in straight.stdout and "train/tokens_per_second:" in straight.stdout
    events = EventAccumulator(str(folder / "out" / "tensorboard"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    assert logged == pytest.approx(metrics(folder, "train/loss"))
    assert [event.step for event in events.Scalars("val/perplexity")] == [4, 8, 10]
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_evaluation_is_that_of_the_saved_model(straight: subprocess.CompletedProcess[str], folder: Path) -> None:
    """Loss over all trained tokens of the held-out rows, perplexity, and greedy samples as transformers has them."""
    model, tokenizer = _saved(folder)
    held_out = _dataset(folder, "held_out")
    loss = _plain_loss(model, [held_out[row] for row in range(len(held_out))]).item()
    assert metrics(folder, "val/loss")[STEPS] == pytest.approx(loss, rel=1e-5)
    assert metrics(folder, "val/perplexity")[STEPS] == pytest.approx(math.exp(loss), rel=1e-4)
    lines = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 10]
    for sample in lines[-1]["data"]["samples"]:
        inputs = tokenizer(sample["prompt"], return_tensors="pt", add_special_tokens=False)
        generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(generated) == sample["generated"]
    assert "generated: " in straight.stdout


def test_saved_model_is_a_model_path_with_a_card(straight: subprocess.CompletedProcess[str], folder: Path) -> None:
    model, tokenizer = _saved(folder)
    prompt = [{"role": "user", "content": "Say c\nnow"}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(generated).endswith("<|im_end|>")
    assert model.generation_config.eos_token_id == [0, tokenizer.eos_token_id]
    card = (folder / SAVED / "README.md").read_text()
    assert "| rows | 20 | 0 |" in card and "| learning rate | 0.002 |" in card and "| seed | 1 |" in card
    assert "| steps | 10 of 10 |" in card
    assert f"| validation perplexity at step 10 | {metrics(folder, 'val/perplexity')[10]:.3f} |" in card
    assert str(folder) not in card


def test_run_equals_a_plain_loop(straight: subprocess.CompletedProcess[str], folder: Path) -> None:
    losses, norms = metrics(folder, "train/loss"), metrics(folder, "train/grad_norm")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.01)
    for step, batch in enumerate(_batches(folder), start=1):
        for group in optimizer.param_groups:
            group["lr"] = _cosine(step - 1)
        loss = _plain_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
        assert norm.item() == pytest.approx(norms[step], rel=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(folder / SAVED, dtype=torch.float32)
    for (name, plain), trained in zip(model.named_parameters(), saved.parameters(), strict=True):
        # AdamW's step is as large for a gradient of mere rounding errors, so a few elements may differ by more.
        difference = (plain - trained).abs()
        assert difference.max() < LR / 10 and (difference > 1e-5).float().mean() < 1e-3, name


def _saved(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return AutoModelForCausalLM.from_pretrained(folder / SAVED), AutoTokenizer.from_pretrained(folder / SAVED)


def _cosine(steps_done: int) -> float:
    return LR * 0.5 * (1 + math.cos(math.pi * steps_done / STEPS))


def _dataset(folder: Path, part: str) -> ChatDataset:
    config = data_config(folder / "data", max_length=64, val_size=4, train_batch_size=BATCH)
    files = OmegaConf.create({"names": ["rows"], "part": part})
    return ChatDataset(files, AutoTokenizer.from_pretrained(folder / "model"), config)


def _batches(folder: Path) -> Iterator[list[dict[str, Tensor]]]:
    """The batches of the run: verl shuffles by epoch with torch's sampler."""
    dataset = _dataset(folder, "train")
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=1, drop_last=True)
    for step in range(STEPS):
        epoch, start = divmod(step * BATCH, len(dataset))
        sampler.set_epoch(epoch)
        yield [dataset[index] for index in list(sampler)[start : start + BATCH]]


def _plain_loss(model: torch.nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    """Mean over all trained tokens of the batch."""
    total, tokens = torch.zeros(()), 0
    for row in batch:
        log_p = torch.log_softmax(model(row["input_ids"][None]).logits[0, :-1], dim=-1)
        trained = row["loss_mask"][1:]
        total = total - (log_p.gather(1, row["input_ids"][1:, None]).squeeze(1) * trained).sum()
        tokens += int(trained.sum())
    return total / tokens


# ---------------------------------------------------------------------------------------------------------- resume


def test_resumed_run_equals_the_straight_one(
    straight: subprocess.CompletedProcess[str], folder: Path, tmp_path: Path, server: RunServer
) -> None:
    """Between two epochs; runs that were stopped or killed within one are in test_interrupted.py."""
    resumed = server.train(copy_inputs(folder, tmp_path, step=4))
    assert resumed.status == 0, resumed.printed[-3000:]
    assert_same_run(folder, tmp_path)


def test_checkpoint_of_other_batches_is_refused(
    straight: subprocess.CompletedProcess[str], folder: Path, tmp_path: Path, server: RunServer
) -> None:
    options = ("data.train_batch_size=8", "data.val_size=8", "trainer.test_freq=-1")
    run = server.train(copy_inputs(folder, tmp_path, step=6), *options)
    assert run.status == 1
    assert (
        "ValueError: the checkpoint in out is of a run with other data or another data.train_batch_size" in run.printed
    )
    assert not (tmp_path / "out" / "global_step_8").exists()


# --------------------------------------------------------------------------------------------------------- refused


def test_bad_data_ends_the_run_before_the_model_is_loaded(folder: Path, tmp_path: Path, server: RunServer) -> None:
    copy_inputs(folder, tmp_path)
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    write_dataset(tmp_path / "data", '{"instruction": "a", "output": "b"}\n{"instruction": }\n', name="broken")
    run = server.train(tmp_path, "data.dataset=[rows,broken]")
    assert run.status == 1
    assert re.search(r"ValueError: .*broken.json, row 2 \(line 2, column 17\): not JSON", run.printed)
    assert not list((tmp_path / "out").glob("global_step_*"))


def test_a_model_that_is_not_there_is_named(folder: Path, tmp_path: Path, server: RunServer) -> None:
    run = server.train(copy_inputs(folder, tmp_path), "model.path=modle")
    assert run.status == 1 and "ValueError: model.path=modle is no folder of a model; of a model of the" in run.printed
    (tmp_path / "model" / "config.json").unlink()
    run = server.train(tmp_path)
    assert run.status == 1 and "ValueError: model.path=model cannot be loaded: " in run.printed
    run = server.train_with(tmp_path, [option for option in OPTIONS if not option.startswith("model.path")])
    assert run.status == 1
    assert "ValueError: model.path must be the folder of a model, got None" in run.printed


def test_schedule_longer_than_the_run_ends_it_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, server: RunServer
) -> None:
    copy_inputs(folder, tmp_path)
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    schedule = ("optim.lr_scheduler_type=warmup_stable_decay", "optim.lr_scheduler_kwargs={num_decay_steps:11}")
    run = server.train(tmp_path, *schedule)
    assert run.status == 1 and "num_decay_steps=11 are not parts of 10 steps" in run.printed

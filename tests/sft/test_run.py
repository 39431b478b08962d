"""`python -m megatrain_verl.sft` as a user runs it: training, checkpoints, resume; and a plain loop that it equals."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain_verl.sft.dataset import ChatDataset
from tests.sft.cases import alpaca_rows, data_config, write_dataset
from tests.verl_backend.cases import save_tiny_model

pytestmark = pytest.mark.timeout(400)

ROWS, BATCH, STEPS, LR = 20, 4, 10, 2e-3  # 16 rows are trained on: 4 steps per epoch
OPTIONS = [
    "data.dataset=rows",
    "data.val_size=4",
    f"data.train_batch_size={BATCH}",
    "data.max_length=64",
    "data.max_token_len_per_gpu=64",  # two rows: several micro-batches per step
    "engine.dtype=float32",
    "engine.optimizer_backend=torch",
    "engine.cpu_threads=1",
    f"optim.lr={LR}",
    "optim.lr_warmup_steps_ratio=0",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    "trainer.test_freq=4",
    "trainer.default_local_dir=out",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a data set."""
    folder = tmp_path_factory.mktemp("sft")
    save_tiny_model(folder / "model")
    # As a base model: generation ends where texts end (token 0), not where turns do (token 2).
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 0}')
    write_dataset(folder / "data", alpaca_rows(ROWS))
    return folder


def train(folder: Path, *options: str, model: str = "model") -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`, where its output goes to `out`."""
    files = [f"model.path={model}", "data.dataset_dir=data"]
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VERL_FILE_LOGGER_PATH"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    return subprocess.run(
        [sys.executable, "-m", "megatrain_verl.sft", *files, *OPTIONS, *options],
        env={**environment, "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )


def metrics(folder: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["data"][name] for line in lines if name in line["data"]}


@pytest.fixture(scope="module")
def straight(folder: Path) -> subprocess.CompletedProcess[str]:
    """The run without interruption."""
    run = train(folder)
    assert run.returncode == 0, run.stdout[-3000:]
    return run


# --------------------------------------------------------------------------------------------------------- one run


def test_run_learns_reports_and_says_where_the_model_is(
    straight: subprocess.CompletedProcess[str], folder: Path
) -> None:
    losses, evaluated = metrics(folder, "train/loss"), metrics(folder, "val/loss")
    assert sorted(losses) == list(range(1, STEPS + 1)) and sorted(evaluated) == [4, 8, 10]
    assert losses[STEPS] < 0.7 * losses[1] and evaluated[10] < evaluated[4]
    rates = metrics(folder, "train/lr")  # verl reports the rate of the step to come
    assert rates == pytest.approx({step: _cosine(step) for step in losses})
    assert "data set rows: 20 of 20 rows" in straight.stdout
    assert re.search(r"Epoch 3/3: .*\d+/4", straight.stdout)
    assert straight.stdout.rstrip().endswith("out/global_step_10/huggingface")


def test_saved_model_is_a_model_path(straight: subprocess.CompletedProcess[str], folder: Path) -> None:
    saved = folder / "out" / "global_step_10" / "huggingface"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    prompt = [{"role": "user", "content": "Say c\nnow"}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(generated).endswith("<|im_end|>")
    assert model.generation_config.eos_token_id == [0, tokenizer.eos_token_id]


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
    saved = AutoModelForCausalLM.from_pretrained(folder / "out" / "global_step_10" / "huggingface", dtype=torch.float32)
    for (name, plain), trained in zip(model.named_parameters(), saved.parameters(), strict=True):
        # AdamW's step is as large for a gradient of mere rounding errors, so a few elements may differ by more.
        difference = (plain - trained).abs()
        assert difference.max() < LR / 10 and (difference > 1e-5).float().mean() < 1e-3, name


def _cosine(steps_done: int) -> float:
    return LR * 0.5 * (1 + math.cos(math.pi * steps_done / STEPS))


def _batches(folder: Path) -> Iterator[list[dict[str, Tensor]]]:
    """The batches of the run: verl shuffles by epoch with torch's sampler."""
    config = data_config(folder / "data", max_length=64, val_size=4, train_batch_size=BATCH)
    files = OmegaConf.create({"names": ["rows"], "part": "train"})
    dataset = ChatDataset(files, AutoTokenizer.from_pretrained(folder / "model"), config)
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


@pytest.mark.parametrize("step", [6, 4], ids=["within an epoch", "between epochs"])
def test_resumed_run_equals_the_straight_one(
    straight: subprocess.CompletedProcess[str], folder: Path, tmp_path: Path, step: int
) -> None:
    _copy_until(step, folder, tmp_path)
    resumed = train(tmp_path)
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    for name in ("train/loss", "val/loss"):
        assert metrics(tmp_path, name) == metrics(folder, name)
    for kind in ("engine", "huggingface"):
        files = sorted((folder / "out" / "global_step_10" / kind).glob("*.safetensors"))
        assert files
        for file in files:
            assert file.read_bytes() == (tmp_path / "out" / "global_step_10" / kind / file.name).read_bytes(), file.name


def test_checkpoint_of_other_batches_is_refused(
    straight: subprocess.CompletedProcess[str], folder: Path, tmp_path: Path
) -> None:
    _copy_until(6, folder, tmp_path)
    run = train(tmp_path, "data.train_batch_size=8", "data.val_size=8", "trainer.test_freq=-1")
    assert run.returncode == 1
    assert (
        "ValueError: the checkpoint in out is of a run with other data or another data.train_batch_size" in run.stdout
    )
    assert not (tmp_path / "out" / "global_step_8").exists()


def _copy_until(step: int, folder: Path, target: Path) -> None:
    """What `folder` held when the run had saved `step`, and some more lines of metrics."""
    for name in ("model", "data", f"out/global_step_{step}"):
        shutil.copytree(folder / name, target / name)
    shutil.copy(folder / "out" / "metrics.jsonl", target / "out")
    (target / "out" / "latest_checkpointed_iteration.txt").write_text(str(step))


# --------------------------------------------------------------------------------------------------------- refused


def test_bad_data_ends_the_run_before_the_model_is_loaded(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    write_dataset(folder / "data", '{"instruction": "a", "output": "b"}\n{"instruction": }\n', name="broken")
    run = train(folder, "data.dataset=[rows,broken]", "trainer.default_local_dir=refused", model="no_weights")
    assert run.returncode == 1
    assert re.search(r"ValueError: .*broken.json, row 2 \(line 2, column 17\): not JSON", run.stdout)
    assert not list((folder / "refused").glob("global_step_*"))

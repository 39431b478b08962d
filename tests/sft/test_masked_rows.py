"""Rows of one token and rows without a trained token, from a data set of the user's own: counted, and no gradient."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sft.runs import RunServer, make_inputs, metrics

pytestmark = pytest.mark.timeout(400)

TEXT = list(range(40, 52))  # its last four tokens are trained
ROWS = f"""
import torch
from torch.utils.data import Dataset

TEXT = {TEXT}
ROWS = {{
    "train": [([40], [0]), (TEXT, [0] * 12), (TEXT, [0] * 8 + [1] * 4), (TEXT[:9], [0] * 8 + [1])],
    "masked": [([40], [0]), (TEXT, [0] * 12)],
    "val": [([40], [0]), (TEXT, [0] * 8 + [1] * 4), (TEXT, [0] * 12)],
}}

class Rows(Dataset):
    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples=-1):
        self.rows = ROWS[parquet_files]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids, mask = map(torch.tensor, self.rows[index])
        return {{"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}}
"""
OPTIONS = (
    "data.dataset=null",
    "data.val_size=0",
    "data.custom_cls.path=rows.py",
    "data.custom_cls.name=Rows",
    "data.train_batch_size=1",
    "trainer.total_training_steps=8",
    "trainer.test_freq=8",
    "trainer.save_freq=-1",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.py").write_text(ROWS)
    return make_inputs(tmp_path)


def test_batches_without_a_trained_token_are_counted_and_the_others_trained(folder: Path, server: RunServer) -> None:
    run = server.train(folder, *OPTIONS, "data.train_files=train", "data.val_files=val")
    assert run.status == 0, run.printed[-3000:]
    assert "4 batches had no label and gave no gradient" in run.printed  # two of the four in each of two epochs
    losses, norms = (metrics(folder, f"train/{name}") for name in ("loss", "grad_norm"))
    empty = [step for step, norm in norms.items() if norm == 0]
    assert len(losses) == 8 and [losses[step] for step in empty] == [0.0] * 4
    assert all(math.isfinite(losses[step]) and losses[step] > 0 for step in losses if step not in empty)
    # The evaluation is that of the one row that has trained tokens, whatever lies beside it.
    model = AutoModelForCausalLM.from_pretrained(folder / "out" / "global_step_8" / "huggingface")
    ids = torch.tensor([TEXT])
    loss = model(ids, labels=torch.where(torch.arange(12) < 8, -100, ids)).loss.item()
    assert metrics(folder, "val/loss")[8] == pytest.approx(loss, rel=1e-5)


def test_a_run_without_any_trained_token_leaves_the_weights_alone(folder: Path, server: RunServer) -> None:
    run = server.train(
        folder,
        *OPTIONS,
        "data.train_files=masked",
        "data.val_files=masked",
        "optim.weight_decay=0",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
    )
    assert run.status == 0, run.printed[-3000:]
    assert "2 batches had no label and gave no gradient" in run.printed
    assert metrics(folder, "val/loss") == {2: None}  # not a number: a mean of nothing
    folders = folder / "model", folder / "out" / "global_step_2" / "huggingface"
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in folders)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

"""Damaged and foreign files of a checkpoint are named before anything is loaded or overwritten."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatrain_verl.sft import metrics_file, saved_files
from megatrain_verl.sft.run_state import RunState, perplexity
from megatrain_verl.sft.trainer import SFTTrainer


class Foreign:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return print, ("run by unpickling",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    torch.save({"_num_yielded": 3, "_sampler_iter_state": None}, folder / "data_0.pt")
    state = RunState()
    state.trained(3, 500, 2.0, 1.0)
    state.write(folder)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def read(folder: Path) -> RunState:
    """What the trainer does with a checkpoint before the engine loads it."""
    trainer = SFTTrainer.__new__(SFTTrainer)
    trainer.state = RunState()
    trainer.read(folder)
    return trainer.state


def test_a_whole_checkpoint_is_read(checkpoint: Path) -> None:
    saved_files.check_tracker(checkpoint.parent)
    assert read(checkpoint) == RunState(step=3, tokens=500, train_loss=2.0)


@pytest.mark.parametrize("name", ["data_0.pt", "run_state.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise"])
def test_a_damaged_file_is_named(checkpoint: Path, name: str, damage: str) -> None:
    path = checkpoint / name
    content = {"empty": b"", "cut": path.read_bytes()[: path.stat().st_size // 2], "noise": b"\x80\x02nothing\xff"}
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(ValueError, match=name):
        read(checkpoint)


def test_a_foreign_loader_state_is_not_run(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "data_0.pt").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(ValueError, match="data_0.pt is damaged"):
        read(checkpoint)
    torch.save(Foreign(), checkpoint / "data_0.pt")
    with pytest.raises(ValueError, match="data_0.pt is damaged"):
        read(checkpoint)
    assert "run by unpickling" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"), [("", "names no step"), ("3\n4", "names no step"), ("7", "step_7 does not")]
)
def test_a_tracker_that_names_no_checkpoint_is_refused(checkpoint: Path, text: str, message: str) -> None:
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        saved_files.check_tracker(checkpoint.parent)


def test_a_foreign_metrics_file_is_named_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"data":{"a":1}}\n["step"]\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is not what a run wrote"):
        metrics_file.trim(path, 1)


def test_best_evaluation_and_perplexity() -> None:
    state = RunState()
    for step, loss in enumerate([3.0, 2.0, float("nan"), 2.5], start=1):
        state.trained(step, 10, 1.0, 1.0)
        state.evaluated(loss)
    assert (state.best_loss, state.best_step, state.evaluations_since_best) == (2.0, 2, 2)
    assert perplexity(0.0) == 1.0 and perplexity(1e5) == float("inf")

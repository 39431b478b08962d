"""Runs that are stopped, killed, or meet a fault in the middle: nothing that was trained is lost, and nothing hangs."""

import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest

from tests.sft.runs import Run, RunServer, assert_same_run, copy_inputs, make_inputs, metrics

pytestmark = pytest.mark.timeout(900)
NOT_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts file systems for one process")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, server: RunServer) -> Path:
    """The folder of a run without interruption."""
    folder = make_inputs(tmp_path_factory.mktemp("straight"))
    run = server.train(folder)
    assert run.status == 0, run.printed[-3000:]
    return folder


def wait_for(run: Run, text: str, seconds: float = 400) -> None:
    """Until the run has printed `text`."""
    end = time.monotonic() + seconds
    while text not in run.printed():
        assert time.monotonic() < end, run.printed()[-3000:]
        time.sleep(0.02)


def test_sigterm_saves_and_the_printed_command_resumes(straight: Path, tmp_path: Path, server: RunServer) -> None:
    copy_inputs(straight, tmp_path)
    stopped = server.train(tmp_path, "trainer.save_freq=-1", before=("tests.sft.faults.send", [signal.SIGTERM, 5]))
    assert stopped.status == 0, stopped.printed[-3000:]
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert "the run ends at step 5: SIGTERM" in stopped.printed
    command = shlex.split(stopped.printed.rsplit("to go on: ", 1)[1])
    assert command[0] == "VERL_PLATFORM=cpu" and command[2:4] == ["-m", "megatrain_verl.sft"]
    resumed = server.train_with(tmp_path, command[4:])
    assert resumed.status == 0, resumed.printed[-3000:]
    assert_same_run(straight, tmp_path)


def test_ctrl_c_saves_as_sigterm_does(straight: Path, tmp_path: Path, server: RunServer) -> None:
    copy_inputs(straight, tmp_path)
    stopped = server.train(tmp_path, "trainer.save_freq=-1", before=("tests.sft.faults.send", [signal.SIGINT, 3]))
    assert stopped.status == 0, stopped.printed[-3000:]
    assert "the run ends at step 3: SIGINT" in stopped.printed and "to go on: VERL_PLATFORM=cpu" in stopped.printed
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_run_killed_in_the_optimizer_step_resumes_to_the_same(
    straight: Path, tmp_path: Path, server: RunServer
) -> None:
    copy_inputs(straight, tmp_path)
    killed = server.train(tmp_path, before=("tests.sft.faults.kill_in_optimizer_step", 7))
    assert killed.status == -signal.SIGKILL
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "6"
    resumed = server.train(tmp_path)
    assert resumed.status == 0, resumed.printed[-3000:]
    assert_same_run(straight, tmp_path)


def test_out_of_memory_saves_the_last_whole_step(straight: Path, tmp_path: Path, server: RunServer) -> None:
    copy_inputs(straight, tmp_path)
    failed = server.train(tmp_path, "trainer.save_freq=-1", before=("tests.sft.faults.out_of_memory", 7))
    assert failed.status == 1 and "Step 6 is saved. To go on from it" in failed.printed
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "6"
    resumed = server.train(tmp_path)
    assert resumed.status == 0, resumed.printed[-3000:]
    assert_same_run(straight, tmp_path)


def test_a_nan_gradient_changes_nothing(straight: Path, tmp_path: Path, server: RunServer) -> None:
    """The run is that of the same batches without the spoilt step's update: its next loss is of the same weights."""
    copy_inputs(straight, tmp_path)
    run = server.train(tmp_path, before=("tests.sft.faults.nan_gradient", [3]))
    assert run.status == 0, run.printed[-3000:]
    assert "the gradient norm is nan: this step changes nothing" in run.printed
    losses = metrics(tmp_path, "train/loss")
    assert losses[3] is None and None not in [losses[step] for step in losses if step != 3]
    assert losses[1] == metrics(straight, "train/loss")[1] and losses[10] < losses[1]
    state = json.loads((tmp_path / "out" / "global_step_10" / "engine" / "state.json").read_text())
    assert state["meta"]["step_count"] == 9


def test_a_run_that_trains_nothing_any_more_ends(straight: Path, tmp_path: Path, server: RunServer) -> None:
    copy_inputs(straight, tmp_path)
    options = ("trainer.total_training_steps=30", "trainer.test_freq=-1", "trainer.save_freq=-1")
    run = server.train(tmp_path, *options, before=("tests.sft.faults.nan_gradient", list(range(3, 40))))
    assert run.status == 1
    assert "ValueError: the gradients of the last 10 steps were not finite and nothing was trained" in run.printed
    assert sorted(metrics(tmp_path, "train/loss")) == list(range(1, 13))


def test_early_stop_ends_at_the_evaluation_that_decides_and_stays_ended(
    straight: Path, tmp_path: Path, server: RunServer
) -> None:
    copy_inputs(straight, tmp_path)
    # With this learning rate the validation loss rises.
    options = ("trainer.early_stop_patience=2", "trainer.test_freq=1", "trainer.save_freq=-1", "optim.lr=0.5")
    run = server.train(tmp_path, *options, "trainer.total_training_steps=100", "optim.lr_scheduler_type=constant")
    assert run.status == 0, run.printed[-3000:]
    losses = metrics(tmp_path, "val/loss")
    best, last = min(losses, key=losses.get), max(losses)
    assert last == best + 2 < 100 and f"the run ends at step {last}" in run.printed
    assert (tmp_path / "out" / f"global_step_{last}" / "huggingface" / "README.md").exists()
    again = server.train(tmp_path, *options, "trainer.total_training_steps=100", "optim.lr_scheduler_type=constant")
    assert again.status == 0 and f"the run in out has ended at step {last}" in again.printed


# ------------------------------------------------------------------------------------------------------ the machine


def test_a_second_run_in_the_folder_is_refused_by_name(straight: Path, tmp_path: Path, server: RunServer) -> None:
    endless = ("trainer.total_training_steps=100000", "trainer.test_freq=-1", "trainer.save_freq=-1")
    first = server.start(copy_inputs(straight, tmp_path), *endless)
    wait_for(first, "step:1 ")
    second = server.train(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait().status == -signal.SIGKILL
    assert second.status == 1
    assert (
        f"ValueError: trainer.default_local_dir=out is in use by another run (process {first.pid} on" in second.printed
    )
    assert server.train(tmp_path).status == 0  # the lock of a killed run holds nobody up


@NOT_ROOT
def test_a_read_only_output_folder_is_refused_before_the_data_is_read(
    straight: Path, tmp_path: Path, server: RunServer
) -> None:
    copy_inputs(straight, tmp_path)
    (tmp_path / "out").mkdir()
    run = server.train(tmp_path, before=("tests.sft.faults.read_only", str(tmp_path / "out")))
    assert run.status == 1 and "data set rows" not in run.printed
    assert "trainer.default_local_dir=out cannot be written (Read-only file system); set it to another" in run.printed


@NOT_ROOT
def test_a_poor_machine_gives_the_same_run(straight: Path, tmp_path: Path, server: RunServer) -> None:
    """One OpenMP thread, no compiler, a /dev/shm of 64 MB: slower, with one warning, and equal to rounding."""
    copy_inputs(straight, tmp_path)
    environment = {"OMP_NUM_THREADS": "1", "PATH": "/nowhere", "CC": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = server.train(
        tmp_path,
        "engine.optimizer_backend=auto",
        "engine.cpu_threads=null",
        before=("tests.sft.faults.small_shared_memory", "64m"),
        env=environment,
    )
    assert run.status == 0, run.printed[-3000:]
    assert run.printed.count("torch's fused AdamW") == 1
    assert metrics(tmp_path, "train/loss") == pytest.approx(metrics(straight, "train/loss"), rel=1e-5)

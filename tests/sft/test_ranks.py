"""SFT in two processes on one set of arenas, by the command itself: the same run as in one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.sft.runs import ENVIRONMENT, OPTIONS, ROOT, make_inputs, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SHORT = ("trainer.total_training_steps=6", "trainer.save_freq=3", "trainer.test_freq=3")


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """The run in `folder`, whose output goes to `log`."""
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megatrain_verl.sft", *OPTIONS, *SHORT, *options],
            env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            cwd=folder,
            text=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def printed(folder: Path) -> str:
    return (folder / "log").read_text()


def ranks_of(parent: int) -> list[int]:
    """The processes that `parent` has started for its ranks."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def runs(pid: int) -> bool:
    """Not so a process that has ended and waits for its new parent to ask how: bounded_run.py asks at its own end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_training(folder: Path, run: subprocess.Popen[str]) -> None:
    """Until the first step is in the metrics."""
    while not metrics_file(folder).exists() or not metrics_file(folder).read_bytes():
        assert run.poll() is None, printed(folder)[-3000:]
        time.sleep(0.2)


def metrics_file(folder: Path) -> Path:
    return folder / "out" / "metrics.jsonl"


def test_two_processes_do_the_same_run_and_one_goes_on(tmp_path: Path) -> None:
    folders = {name: make_inputs(tmp_path / name) for name in ("one", "two")}
    assert start(folders["one"]).wait(400) == 0, printed(folders["one"])[-3000:]
    assert start(folders["two"], "trainer.devices=[0,1]").wait(600) == 0, printed(folders["two"])[-3000:]
    for name in ("train/loss", "train/grad_norm", "train/global_tokens", "val/loss"):
        one, two = (metrics(folder, name) for folder in folders.values())
        assert two == pytest.approx(one, rel=1e-4), name
    # From step 3 of two processes with one.
    (folders["two"] / "out" / "latest_checkpointed_iteration.txt").write_text("3")
    before = metrics(folders["two"], "train/loss")
    assert start(folders["two"]).wait(400) == 0, printed(folders["two"])[-3000:]
    assert metrics(folders["two"], "train/loss") == pytest.approx(before, rel=1e-4)


def test_a_killed_process_ends_the_run_and_sigterm_or_ctrl_c_saves_it(tmp_path: Path) -> None:
    folder = make_inputs(tmp_path / "run")
    endless = ("trainer.devices=[0,1]", "trainer.total_training_steps=100000", "trainer.test_freq=-1")
    run = start(folder, *endless)
    wait_until_training(folder, run)
    ranks = ranks_of(run.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert run.wait(60) != 0
    assert "rank 1" in printed(folder) and "was ended by signal 9" in printed(folder)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

    for ctrl_c in (False, True):
        metrics_file(folder).unlink()
        run = start(folder, *endless)  # at once, in the same folder, from the last checkpoint
        wait_until_training(folder, run)
        for pid in [*ranks_of(run.pid), run.pid] if ctrl_c else []:  # as a terminal does
            os.kill(pid, signal.SIGINT)
        if not ctrl_c:
            run.terminate()
        assert run.wait(120) == 0, printed(folder)[-3000:]
        assert "to go on: " in printed(folder) and "trainer.devices=[0,1]" in printed(folder)


def test_ranks_end_with_the_process_that_has_started_them(tmp_path: Path) -> None:
    run = f"run_ranks(stand_still, ({str(tmp_path)!r},), ['0', '1'])"
    code = f"from megatrain_verl.sft.launch import run_ranks; from tests.sft.faults import stand_still; {run}"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    try:
        while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 2:
            assert parent.poll() is None
            time.sleep(0.1)
    finally:
        parent.kill()  # as the kernel does without memory: it can end nobody
    end = time.monotonic() + 30
    while any(map(runs, ranks)):
        assert time.monotonic() < end
        time.sleep(0.1)

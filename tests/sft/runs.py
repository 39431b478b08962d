"""Runs of `python -m megatrain_verl.sft`, each a fork of one process that has imported everything (run_server.py)."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sft.cases import alpaca_rows, write_dataset
from tests.verl_backend.cases import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "VERL_FILE_LOGGER_PATH",
    "TENSORBOARD_DIR",
}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # a fork would not keep the threads of more
    "TOKENIZERS_PARALLELISM": "false",
}
OPTIONS = [
    "model.path=model",
    "data.dataset_dir=data",
    "data.dataset=rows",
    "data.val_size=4",
    "data.train_batch_size=4",
    "data.max_length=64",
    "data.max_token_len_per_gpu=64",  # two rows: several micro-batches per step
    "engine.dtype=float32",
    "engine.optimizer_backend=torch",
    "engine.cpu_threads=1",
    "optim.lr=2e-3",
    "optim.lr_warmup_steps_ratio=0",
    "trainer.total_training_steps=10",
    "trainer.save_freq=2",
    "trainer.test_freq=4",
    "trainer.sample_tokens=8",
    "trainer.logger=[console,file,tensorboard]",
    "trainer.default_local_dir=out",
]


@dataclass
class Ended:
    """What a run left: exit status (minus the signal that killed it) and all that it printed."""

    status: int
    printed: str


class Run:
    """One run that has been started."""

    def __init__(self, server: "RunServer", pid: int, log: Path) -> None:
        self.pid, self._server, self._log = pid, server, log

    def printed(self) -> str:
        """What it has printed so far."""
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float = 400) -> Ended:
        """Wait for its end, for so long at most."""
        status = self._server.ask({"wait": self.pid, "seconds": seconds})["status"]
        assert status is not None, f"the run did not end within {seconds} s: {self.printed()[-3000:]}"
        return Ended(status, self.printed())


class RunServer:
    """The process that forks the runs; `close` ends it, and with it what still runs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sft.run_server"],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request of `run_server` and return its answer."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answers = (line for line in self._process.stdout if line.startswith("{"))  # imports may print
        return json.loads(next(answers))

    def start(
        self, folder: Path, *options: str, before: tuple[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> Run:
        """Start a run in `folder` with `OPTIONS` and `options`; `before` is called in its process."""
        return self._start(folder, [*OPTIONS, *options], before, env or {})

    def train(
        self, folder: Path, *options: str, before: tuple[str, Any] | None = None, env: dict[str, str] | None = None
    ) -> Ended:
        """`start` and wait."""
        return self.start(folder, *options, before=before, env=env).wait()

    def train_with(self, folder: Path, arguments: list[str], seconds: float = 400) -> Ended:
        """A run with these arguments alone."""
        return self._start(folder, arguments, None, {}).wait(seconds)

    def _start(self, folder: Path, arguments: list[str], before: tuple[str, Any] | None, env: dict[str, str]) -> Run:
        self._count += 1
        log = folder / f"printed_{self._count}.txt"
        log.touch()
        request = {"argv": arguments, "cwd": str(folder), "env": env, "log": str(log), "before": before}
        return Run(self, self.ask(request)["pid"], log)

    def close(self) -> None:
        """End the server."""
        self._process.stdin.close()
        self._process.wait(timeout=30)


def make_inputs(folder: Path) -> Path:
    """A tiny model and the data set of `OPTIONS` in `folder`: 20 rows, of which 16 are trained on."""
    save_tiny_model(folder / "model")
    # As a base model: generation ends where texts end (token 0), not where turns do (token 2).
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": 0}')
    write_dataset(folder / "data", alpaca_rows(20))
    return folder


def copy_inputs(folder: Path, target: Path, step: int | None = None) -> Path:
    """The inputs of `folder` in `target`; with `step` also what was there when the run had saved that step."""
    for name in ("model", "data", *([] if step is None else [f"out/global_step_{step}"])):
        shutil.copytree(folder / name, target / name)
    if step is not None:  # and some more lines of metrics and samples
        for name in ("metrics.jsonl", "samples.jsonl"):
            shutil.copy(folder / "out" / name, target / "out")
        (target / "out" / "latest_checkpointed_iteration.txt").write_text(str(step))
    return target


def assert_same_run(straight: Path, other: Path) -> None:
    """The metrics of both runs and what they saved at the end are equal, bit for bit."""
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/total_tokens(B)", "val/loss", "val/perplexity"):
        assert metrics(other, name) == metrics(straight, name), name
    assert (other / "out" / "samples.jsonl").read_bytes() == (straight / "out" / "samples.jsonl").read_bytes()
    for kind in ("engine", "huggingface"):
        files = sorted((straight / "out" / "global_step_10" / kind).glob("*.safetensors"))
        assert files
        for file in files:
            assert file.read_bytes() == (other / "out" / "global_step_10" / kind / file.name).read_bytes(), file.name
    assert (other / "out" / "loss.png").stat().st_size > 10_000


def metrics(folder: Path, name: str) -> dict[int, float]:
    """Values of one metric by step, from the metrics file of the run in `folder`."""
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["data"][name] for line in lines if name in line["data"]}

"""SFT of SmolLM2-135M-Instruct equals the golden losses and gradient norms of a plain loop."""

import json
from pathlib import Path

import make_model
import pytest

from tests.sft import plain_loop
from tests.sft.cases import write_dataset
from tests.sft.runs import RunServer

STEPS = 10
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    "data.dataset=sums",
    f"data.train_batch_size={plain_loop.BATCH}",
    "data.max_length=32",
    "data.max_token_len_per_gpu=32",  # one row: several micro-batches per step
    "engine.dtype=float32",
    f"optim.lr={plain_loop.LR}",
    "optim.lr_scheduler_type=constant",
    "optim.lr_warmup_steps_ratio=0",
    "checkpoint.save_contents=[]",
    "trainer.seed=0",  # of the order of the rows, as in the plain loop
    "trainer.default_local_dir=out",
]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The quickstart's model, made on first use (a download of 93 MB)."""
    folder = ROOT / "outputs" / "models" / "SmolLM2-135M-Instruct"
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_model.main(folder, tiny=False)
    return folder


def run(model: Path, folder: Path, server: RunServer, steps: int) -> dict[str, list[float]]:
    """Loss and gradient norm of each step of the command."""
    write_dataset(folder / "data", plain_loop.rows(), name="sums")
    files = [f"model.path={model}", f"data.dataset_dir={folder / 'data'}", f"trainer.total_training_steps={steps}"]
    ended = server.train_with(folder, [*files, *OPTIONS], seconds=1700)
    assert ended.status == 0, ended.printed[-3000:]
    lines = [json.loads(line)["data"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[f"train/{name}"] for line in lines] for name in ("loss", "grad_norm")}


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Of all steps, relative to the expected value."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.timeout(900)
def test_sft_equals_the_golden_losses(smollm2: Path, tmp_path: Path, server: RunServer) -> None:
    golden = json.loads(plain_loop.GOLDEN.read_text())
    found = run(smollm2, tmp_path, server, STEPS)
    assert largest_difference(found["loss"], golden["loss"][:STEPS]) < 1e-5
    assert largest_difference(found["grad_norm"], golden["grad_norm"][:STEPS]) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sft_equals_all_golden_losses(smollm2: Path, tmp_path: Path, server: RunServer) -> None:
    golden = json.loads(plain_loop.GOLDEN.read_text())
    found = run(smollm2, tmp_path, server, plain_loop.STEPS)
    for name, value in found.items():
        by_steps = {steps: largest_difference(value[:steps], golden[name][:steps]) for steps in (STEPS, 30, 100)}
        print(name, {steps: f"{difference:.1e}" for steps, difference in by_steps.items()})
    # Rounding grows from step to step under AdamW: 1e-6 at the first step, a few 1e-5 at the hundredth.
    assert largest_difference(found["loss"], golden["loss"]) < 1e-4
    assert largest_difference(found["grad_norm"], golden["grad_norm"]) < 1e-4

"""A save that is killed, or finds the disk full, at any change of any file: the run can always be resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from tests.faults import write_points  # noqa: E402
from tests.verl_backend.cases import save_tiny_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_points.compile_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), layers=1)


def reports(kind: str, library: Path, model: Path, folder: Path, again: str, swaps: str) -> list[dict[str, object]]:
    environment = {"LD_PRELOAD": str(library), write_points.LIBRARY: str(library), "VERL_PLATFORM": "cpu"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults.saves", kind, model, folder, again, swaps],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


SAVES = [
    pytest.param("rl", "new", "swaps", id="rl"),
    pytest.param("rl", "again", "no swaps", id="rl again", marks=pytest.mark.slow),
    pytest.param("sft", "new", "swaps", id="sft", marks=pytest.mark.slow),
    pytest.param("sft", "again", "swaps", id="sft again", marks=pytest.mark.slow),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "again", "swaps"), SAVES)
def test_a_fault_at_any_point_of_a_save(
    library: Path, model: Path, tmp_path: Path, kind: str, again: str, swaps: str
) -> None:
    """`again`: an earlier run saved the same step and its tracker names it. `no swaps`: a file system such as NFS."""
    found = reports(kind, library, model, tmp_path, again, swaps)
    errors = [report for report in found if report["error"]]
    assert not errors, json.dumps(errors, indent=1)
    names = {
        action: [report["name"] for report in found if report["action"] == action] for action in ("kill", "full disk")
    }
    own = ("run_state.json", "huggingface/README.md") if kind == "sft" else ()
    for written in (
        "engine",
        "huggingface/tokenizer.json",
        "extra_state.json",
        ".pt.new",
        "latest_checkpointed_iteration",
        *own,
    ):
        assert any(name.startswith("write") and written in name for name in names["kill"]), written
        assert any(name.startswith("write") and written in name for name in names["full disk"]), written
    assert any(name.startswith("rename") for name in names["kill"])
    if again == "new":
        assert any(name.startswith("unlink") and "removed" in name for name in names["kill"])

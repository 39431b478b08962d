"""Memory of a process that trains, against the plan that the engine checks before it allocates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "bfloat16": {},
    "bfloat16 with a reference": {"reference": True},
    "waves with float32 gradients": {"wave_tokens": 16},
    "float32": {"dtype": "float32"},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in CASES.items()])
def test_process_grows_by_the_plan(options: dict[str, object]) -> None:
    """Two steps of 60 million parameters; everything that the process takes beyond its imports counts."""
    found = measured("cpu", "60m", **options)
    assert found["grown"] == pytest.approx(found["plan"], rel=0.05), found


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in CASES.items()])
def test_process_grows_by_the_plan_on_a_gpu(options: dict[str, object]) -> None:
    found = measured("cuda", "1.5b", **options)
    assert found["grown"] == pytest.approx(found["plan"], rel=0.05), found


def measured(device: str, shape: str, **options: object) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.process_growth", device, shape, json.dumps(options)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])

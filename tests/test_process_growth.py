"""Memory of a process that trains, against the plan that the engine checks before it allocates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain_verl.resources import MARGIN

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "bfloat16": {},
    # With waves, since gradients in float32 may go through slabs, which the plan counts.
    "float32": {"dtype": "float32", "wave_tokens": 16, "resident_layers": 0},
    "reference": {"reference": True},
    # resident_layers=0: the waves add up on the host, not on a GPU that has room for them.
    "waves": {"wave_tokens": 16, "resident_layers": 0},
    "speculative AdamW": {"speculative_adamw_gb": 0.75},
}
by_case = pytest.mark.parametrize("options", [pytest.param(options, id=name) for name, options in CASES.items()])


@by_case
def test_process_grows_by_the_plan(options: dict[str, object]) -> None:
    """Two steps of 107 million parameters, 1.5 to 2 GB."""
    found = measured("cpu", "100m", {"cpu_threads": 1, **options})
    assert found["grown"] == pytest.approx(found["plan"], rel=0.05), found


@pytest.mark.gpu
@by_case
def test_process_grows_by_the_plan_on_a_gpu(options: dict[str, object]) -> None:
    """Two steps of 1.5 billion parameters, 22 to 28 GB; nor does the process ever hold more than is checked."""
    found = measured("cuda", "1.5b", options)
    assert found["grown"] == pytest.approx(found["plan"], rel=0.05), found
    assert found["peak"] <= found["plan"] * MARGIN, found


def measured(device: str, shape: str, options: dict[str, object]) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.process_growth", device, shape, json.dumps(options)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])

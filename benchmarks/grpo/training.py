"""Starts verl's trainer as the example scripts do."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Names of configs/rl/hardware/*.yaml, which are also the arguments of examples/environment.sh.
ENVIRONMENT = '. examples/environment.sh "$1" && shift && exec "$@"'


def hardware(device: str | None) -> str:
    """`gpu` or `cpu` for "cuda", "cpu", or None: whether nvidia-smi finds a GPU."""
    if device is None:
        found = subprocess.run("nvidia-smi --list-gpus", shell=True, capture_output=True).returncode == 0
        device = "cuda" if found else "cpu"
    return "gpu" if device == "cuda" else "cpu"


def check_devices(devices: list[str], machine: str) -> None:
    """Refuse a device that is named twice or, on a machine "gpu", is not among nvidia-smi's.

    Raises:
        ValueError: names it.
    """
    if repeated := sorted({device for device in devices if devices.count(device) > 1}):
        raise ValueError(f"--devices names {', '.join(repeated)} more than once; a rank needs a device of its own")
    if machine == "cpu":
        return
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.replace("\n", ",").split(",")
    there = [name.strip() for name in listed if name.strip()]
    if unknown := [device for device in devices if device not in there]:
        raise ValueError(f"--devices names {', '.join(unknown)}; nvidia-smi lists {', '.join(there)}")


def run(module: str, arguments: list[str], environment: dict[str, str], machine: str, log: Path, limit: float) -> None:
    """Run `python -m module arguments` in the environment for `machine` ("gpu" or "cpu"); all it prints goes to `log`.

    Raises:
        RuntimeError: it failed or took longer than `limit` seconds; the end of the log is in the message.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ["bash", "-c", ENVIRONMENT, "bash", machine, sys.executable, "examples/bounded_run.py", str(limit)]
    command += [sys.executable, "-m", module, *arguments]
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment | {"PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode != 0:
        raise RuntimeError(f"{module} ended with status {done.returncode}; {log} ends with\n{log.read_text()[-4000:]}")

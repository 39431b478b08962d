"""Memory in use on the whole device, sampled while a run goes: trainer, vLLM and CUDA contexts together.

Of several devices each gives samples of its own, so a peak is that of the fullest one.
"""

import datetime
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

MIB = 1 << 20
INTERVAL_MS = 100


class GpuMemorySampler:
    """Runs nvidia-smi beside the block of a `with`; without it there are no samples.

    `devices`: as in CUDA_VISIBLE_DEVICES; None is the first.
    """

    def __init__(self, file: Path, devices: list[str] | None) -> None:
        self._file = file
        self._devices = devices or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "GpuMemorySampler":
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=timestamp,memory.used", "--format=csv,noheader,nounits"]
            with self._file.open("w") as output:
                where = [f"--id={','.join(self._devices)}", f"--loop-ms={INTERVAL_MS}"]
                self._process = subprocess.Popen([*query, *where], stdout=output)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def samples(self) -> list[tuple[float, int]]:
        """(seconds since the epoch, bytes in use) in order."""
        return parse(self._file.read_text()) if self._file.exists() else []


def parse(text: str) -> list[tuple[float, int]]:
    """nvidia-smi's lines `2026/11/29 18:40:12.345, 1024`; the last one may have been cut off."""
    found = []
    for line in text.splitlines():
        time, _, used = line.partition(", ")
        if used.strip().isdigit():
            moment = datetime.datetime.strptime(time, "%Y/%m/%d %H:%M:%S.%f")
            found.append((moment.timestamp(), int(used) * MIB))
    return found


def peaks(samples: list[tuple[float, int]], spans: list[tuple[str, float, float]]) -> dict[str, int]:
    """Most bytes in use by phase; `spans` are (phase, start, end). What lies in none of them is `rollout`."""
    found: dict[str, int] = {}
    for moment, used in samples:
        phase = next((name for name, start, end in spans if start <= moment <= end), "rollout")
        found[phase] = max(found.get(phase, 0), used)
    return found

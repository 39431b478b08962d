"""Runs one system in processes of its own, one per device, within limits of time and of the machine's memory."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workload import used_host_bytes

HERE = Path(__file__).parent
POLL = 0.2  # seconds
GRACE = 45.0  # seconds in which the other ranks find out that one has failed
ANY_DEVICE = ""  # the process chooses


def run_system(spec: dict, timeout: float, host_memory_limit: float | None) -> dict[str, object]:
    """The measured fields of `spec`, or {"error": why there are none}; see `system.run`.

    A peer that runs out of GPU memory is tried again with half the rows per micro-batch, if none were asked for.

    Args:
        timeout: seconds for one attempt.
        host_memory_limit: bytes in use on the machine at which the process is ended, before the kernel does it.
    """
    fields = _attempt(spec, timeout, host_memory_limit)
    while spec["micro_batch"] is None and fields.get("retry_micro_batch"):
        retry = fields["retry_micro_batch"]
        print(f"{spec['system']}: {fields['error']}; trying {retry} rows per micro-batch", flush=True)
        fields = _attempt(spec | {"micro_batch": retry}, timeout, host_memory_limit)
    return fields


def _attempt(spec: dict, timeout: float, host_memory_limit: float | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(spec, rank, Path(folder)) for rank in range(len(spec["devices"]))]
        try:
            error = _watch([rank.process for rank in ranks], timeout, host_memory_limit)
        finally:
            for rank in ranks:
                rank.end()
        if error is None and all(rank.answered.exists() for rank in ranks):
            return _merge([json.loads(rank.answered.read_text()) for rank in ranks])
        last = [rank.show_log(spec["system"]) for rank in ranks if not rank.answered.exists()]
        return {"error": error or "; ".join(last)}


class _Rank:
    """One process of a system and its files."""

    def __init__(self, spec: dict, rank: int, folder: Path) -> None:
        self.number = rank
        asked, self.answered, self.log = (folder / f"{name}{rank}" for name in ("spec", "result", "log"))
        asked.write_text(json.dumps(spec | {"rank": rank, "group": folder.name}))
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "system.py"), str(asked), str(self.answered)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(spec["devices"], rank),
                start_new_session=True,
            )

    def end(self) -> None:
        """Kill the process and all that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def show_log(self, system: str) -> str:
        """Print the end of the output; returns its last line."""
        tail = self.log.read_text(errors="replace").strip().splitlines()[-25:]
        print("\n".join([f"--- end of the output of {system}, rank {self.number}", *tail, "---"]), flush=True)
        return tail[-1].removeprefix("[rank0]: ") if tail else "no result"  # as torch.distributed prints errors


def _merge(ranks: list[dict[str, object]]) -> dict[str, object]:
    """The first rank's fields; bytes and losses are of all ranks together, the peak that of the fullest device."""
    merged = dict(ranks[0])
    for field in ("loss", "host_bytes", "h2d_bytes", "d2h_bytes") if len(ranks) > 1 else ():
        merged[field] = sum(rank[field] for rank in ranks)
    for field in ("gpu_peak_bytes", "adamw_alone_s") if len(ranks) > 1 else ():
        merged[field] = max(rank[field] for rank in ranks)
    return merged


def _environment(devices: list[str], rank: int) -> dict[str, str]:
    """The package's folder on the path, OpenMP on all cores (torchrun and Ray would set one thread), and a connection
    for each CUDA stream, as the package sets it in workers (see `process_env.py`)."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(devices))))
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if devices[rank] != ANY_DEVICE:
        own["CUDA_VISIBLE_DEVICES"] = devices[rank]
    return {**os.environ, **own}


def _watch(processes: list[subprocess.Popen], timeout: float, host_memory_limit: float | None) -> str | None:
    """Wait for the processes; why they had to be ended or failed, None if they did not."""
    end = time.monotonic() + timeout
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the processes are ended with this one
    failed = False
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            return "the other ranks have not ended" if failed else f"no result within {timeout:g} s"
        if not failed and any(process.poll() for process in processes):
            failed, end = True, min(end, time.monotonic() + GRACE)
        if host_memory_limit is not None and used_host_bytes() > host_memory_limit:
            return f"host memory: more than {host_memory_limit / 2**30:.0f} GiB in use"
        time.sleep(POLL)
    signals = [-process.returncode for process in processes if process.returncode < 0]
    return f"ended by signal {signals[0]}" if signals else None

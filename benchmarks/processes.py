"""Runs one system in a process of its own, within a time limit and a limit on the machine's memory."""

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
        asked, answered, log = (Path(folder) / name for name in ("spec.json", "result.json", "log"))
        asked.write_text(json.dumps(spec))
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "system.py"), str(asked), str(answered)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        try:
            error = _watch(process, timeout, host_memory_limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if error is None and answered.exists():
            return json.loads(answered.read_text())
        tail = log.read_text(errors="replace").strip().splitlines()[-25:]
        print("\n".join([f"--- end of the output of {spec['system']}", *tail, "---"]), flush=True)
        last = tail[-1].removeprefix("[rank0]: ") if tail else "no result"  # as torch.distributed prints errors
        return {"error": error or last}


def _environment() -> dict[str, str]:
    """The package's folder on the path, and OpenMP on all cores: torchrun and Ray would set one thread."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads}


def _watch(process: subprocess.Popen, timeout: float, host_memory_limit: float | None) -> str | None:
    """Wait for the process; why it had to be ended or failed, None if it did not."""
    end = time.monotonic() + timeout
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the process is ended with this one
    while process.poll() is None:
        if time.monotonic() > end:
            return f"no result within {timeout:g} s"
        if host_memory_limit is not None and used_host_bytes() > host_memory_limit:
            return f"host memory: more than {host_memory_limit / 2**30:.0f} GiB in use"
        time.sleep(POLL)
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}"
    return None

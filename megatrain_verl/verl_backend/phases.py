"""Seconds, bytes and memory of the engine's phases: metrics beside verl's own, and a trace for a timeline.

verl carries metrics of the actor's update only, so the figures of a step leave with its last mini-batch: scoring and
update of this step, and the export that followed the update before it.
"""

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from verl.utils.metric import Metric

from megatrain_verl.streaming.engine import StreamingEngine

PHASES = ("score", "score_reference", "forward_backward", "optimizer_step", "export")
GIB = 1 << 30  # what verl's own metrics call gb
# How the reasons of `Streams.host_wait` for AdamW begin, on the host and on the device.
UPDATE_WAITS = ("weights updated ", "AdamW ")


@dataclass
class Phase:
    """One phase; a line of the trace. `start`: seconds since the epoch.

    `adamw_wait_s`: of `seconds`, those in which the engine's thread waited for AdamW.
    """

    phase: str
    start: float
    seconds: float = 0.0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    adamw_wait_s: float = 0.0
    gpu_peak_bytes: int = 0


class PhaseLog:
    """What the engine did since `metrics` was last called.

    Args:
        streaming: the engine.
        trace_file: gets one JSON line per phase, and one per unit that AdamW updated; None writes none.
    """

    def __init__(self, streaming: StreamingEngine, trace_file: str | None) -> None:
        self._streaming, self._trace_file = streaming, None if trace_file is None else Path(trace_file)
        self._cuda = streaming.device == "cuda"
        self._phases: deque[Phase] = deque(maxlen=4096)  # SFT and separate references never take metrics
        self._exported_bytes = self._held_bytes = 0
        self._adamw_seconds = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside. The peak of the device's memory that torch reports starts anew."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        counters, waited = self._streaming.counters, self._waited()
        sent, received = counters.h2d_bytes, counters.d2h_bytes
        phase, start = Phase(name, time.time()), time.perf_counter()
        try:
            yield
        finally:
            phase.seconds = time.perf_counter() - start
            phase.h2d_bytes, phase.d2h_bytes = counters.h2d_bytes - sent, counters.d2h_bytes - received
            phase.adamw_wait_s = self._waited() - waited
            phase.gpu_peak_bytes = torch.cuda.max_memory_allocated() if self._cuda else 0
            self._phases.append(phase)
            self._trace([asdict(phase)])
            self._take_updates()

    def exported(self, nbytes: int) -> None:
        """Count bytes of weights handed to the rollout."""
        self._exported_bytes += nbytes

    def released(self) -> None:
        """The rollout has the device now: note what torch still holds there."""
        if self._cuda:
            self._held_bytes = max(self._held_bytes, torch.cuda.memory_reserved())

    def metrics(self) -> dict[str, Metric]:
        """The figures since the last call, by name; sizes in GiB.

        `<phase>_s`; `h2d_gb`, `d2h_gb`: weights sent to the device and gradients received; `exported_gb`: weights for
        the rollout; `adamw_s`: AdamW on the host; `adamw_wait_s`: the time in which something waited for AdamW, also
        for its part on the device; `host_gb`: resident memory of the process; on CUDA `<phase>_gpu_peak_gb` and
        `gpu_held_gb`: reserved by torch while the rollout has the device.
        """
        self._take_updates()
        phases = [self._phases.popleft() for _ in range(len(self._phases))]
        seconds = {f"{name}_s": _sum(phases, name) for name in PHASES}
        seconds["adamw_s"], self._adamw_seconds = self._adamw_seconds, 0.0
        seconds["adamw_wait_s"] = sum(phase.adamw_wait_s for phase in phases)
        sizes = {
            "h2d_gb": sum(phase.h2d_bytes for phase in phases),
            "d2h_gb": sum(phase.d2h_bytes for phase in phases),
            "exported_gb": self._exported_bytes,
        }
        peaks = {"host_gb": psutil.Process().memory_info().rss}
        if self._cuda:
            peaks["gpu_held_gb"] = self._held_bytes
            for phase in phases:
                name = f"{phase.phase}_gpu_peak_gb"
                peaks[name] = max(peaks.get(name, 0), phase.gpu_peak_bytes)
        self._exported_bytes = self._held_bytes = 0
        metrics = {name: Metric("max", value) for name, value in seconds.items()}
        metrics |= {name: Metric("sum", value / GIB) for name, value in sizes.items()}
        metrics |= {name: Metric("max", value / GIB) for name, value in peaks.items()}
        return {f"megatrain/{name}": metric for name, metric in metrics.items()}

    def _take_updates(self) -> None:
        """Count and trace the updates that AdamW's thread has finished."""
        spans = self._streaming.streams.optimizer.spans
        updates = [spans.popleft() for _ in range(len(spans))]
        self._adamw_seconds += sum(end - start for start, end in updates)
        self._trace([{"phase": "adamw", "start": start, "seconds": end - start} for start, end in updates])

    def _waited(self) -> float:
        return sum(s for reason, s in self._streaming.streams.waited.items() if reason.startswith(UPDATE_WAITS))

    def _trace(self, lines: list[dict[str, object]]) -> None:
        if self._trace_file is not None:
            with self._trace_file.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


def _sum(phases: list[Phase], name: str) -> float:
    return sum(phase.seconds for phase in phases if phase.phase == name)

"""The measured loop of a peer (FSDP2, ZeRO-3): the same for both, around what each calls forward, backward and step."""

import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from workload import WARM_UP, Clock, Workload, resident_bytes, used_host_bytes


class Peer(Protocol):
    """A trainer of a Hugging Face model."""

    settings: str  # what it was set to, in words

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of a micro-batch (rows, length)."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add its gradient; `last`: of the step's micro-batches."""

    def step(self) -> None:
        """Clip, AdamW, zero the gradients."""


@dataclass(frozen=True)
class HostMemory:
    """Host memory before a system was made, in bytes: of the process and of the machine."""

    resident: int
    used: int

    @classmethod
    def now(cls) -> "HostMemory":
        return cls(resident_bytes(), used_host_bytes())

    def process_growth(self) -> int:
        """Bytes by which the process has grown; page-locked arenas are in it, memory that CUDA allocated is not."""
        return resident_bytes() - self.resident

    def growth(self) -> int:
        """Bytes by which the process or the machine's use has grown, the larger: for peers that let CUDA allocate."""
        return max(self.process_growth(), used_host_bytes() - self.used)


def measure_peer(peer: Peer, workload: Workload, micro_batch: int, before: HostMemory) -> dict[str, object]:
    """Warm up, measure, and profile one more step for the bytes that cross; the fields of `report.finish`."""
    clock = Clock(workload.device)
    for step in range(WARM_UP):
        _run_step(peer, workload, micro_batch, clock, step)
    if workload.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [_run_step(peer, workload, micro_batch, clock, WARM_UP + step) for step in range(workload.steps)]
    peak = torch.cuda.max_memory_allocated() if workload.device == "cuda" else 0
    seconds, forward, backward, losses = zip(*times, strict=True)
    rest = [a - b - c for a, b, c in zip(seconds, forward, backward, strict=True)]
    crossed = _crossed_bytes(lambda: _run_step(peer, workload, micro_batch, clock, WARM_UP + workload.steps))
    return {
        "step_s": statistics.median(seconds),
        "forward_s": statistics.median(forward),
        "backward_s": statistics.median(backward),
        "adamw_not_hidden_s": statistics.median(rest),  # with clipping
        "loss": losses[-1],
        "micro_batch": micro_batch,
        "gpu_peak_bytes": peak,
        "host_bytes": before.growth(),
        "h2d_bytes": crossed["HtoD"],
        "d2h_bytes": crossed["DtoH"],
        "settings": peer.settings,
    }


def _run_step(
    peer: Peer, workload: Workload, micro_batch: int, clock: Clock, step: int
) -> tuple[float, float, float, float]:
    """(seconds, of them forward, of them backward, mean loss) of one step."""
    batches = workload.batch(step).to(workload.device).split(micro_batch)
    clock.synchronize()
    start = time.perf_counter()
    marks, losses = [], []
    for number, ids in enumerate(batches):
        begin = clock.mark()
        loss = peer.forward(ids)
        middle = clock.mark()
        peer.backward(loss, last=number == len(batches) - 1)
        marks.append((begin, middle, clock.mark()))
        losses.append(loss.detach())
    clock.synchronize()
    peer.step()
    clock.synchronize()
    seconds = time.perf_counter() - start
    forward = sum(clock.seconds(begin, middle) for begin, middle, _ in marks)
    backward = sum(clock.seconds(middle, end) for _, middle, end in marks)
    return seconds, forward, backward, torch.stack(losses).mean().item()


def _crossed_bytes(step: object) -> dict[str, int]:
    """Bytes of the copies from host to device and back during `step()`, from the profiler's copy events."""
    crossed = {"HtoD": 0, "DtoH": 0}
    if not torch.cuda.is_available():
        return crossed
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    for event in events:
        for way in crossed:
            if event.get("cat") == "gpu_memcpy" and way in event["name"]:
                crossed[way] += int(event["args"]["bytes"])
    return crossed


def largest_micro_batch(workload: Workload) -> int:
    """Rows that should fit beside the logits of a step: the largest divisor of the rows by their estimated bytes.

    Per token: logits in bfloat16 and float32, their log-softmax and both gradients (16 bytes x vocabulary), the kept
    layer inputs, and one layer's activations when it is run again.
    """
    if workload.device == "cpu":
        return workload.rows
    config = workload.config.get_text_config()
    per_token = 16 * config.vocab_size + 2 * config.num_hidden_layers * config.hidden_size
    per_token += 2 * (16 * config.hidden_size + 8 * config.intermediate_size)
    weights = 24 * config.vocab_size * config.hidden_size  # both ends and a layer, with gradients
    free = 0.85 * torch.cuda.mem_get_info()[0] - weights
    rows = max(1, int(free / (per_token * workload.seq_len)))
    return max(size for size in range(1, workload.rows + 1) if workload.rows % size == 0 and size <= rows)

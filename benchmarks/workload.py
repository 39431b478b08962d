"""The work that every system of the benchmark does: the same weights, tokens and AdamW settings."""

import dataclasses
import time
import zlib
from pathlib import Path

import torch
from shapes import model_config
from torch import Tensor
from transformers import PretrainedConfig

WARM_UP = 2
ADAMW = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP_GRAD = 1.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step: `rows` sequences of `seq_len` random tokens, mean cross-entropy of the next token, clipping, AdamW.

    Attributes:
        model: a name of `shapes.SHAPES`, or a folder with config.json.
        layers: cut the model to that many; None leaves it.
        steps: measured ones, after `WARM_UP` others.
        device: "cuda" (bfloat16 compute) or "cpu" (float32, for trying the benchmark out).
    """

    model: str
    layers: int | None
    rows: int
    seq_len: int
    steps: int
    device: str

    @property
    def config(self) -> PretrainedConfig:
        return model_config(self.model, self.layers)

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    @property
    def scored_tokens(self) -> int:
        """Tokens with a loss: the last of a row has no next token."""
        return self.rows * (self.seq_len - 1)

    def batch(self, step: int) -> Tensor:
        """(rows, seq_len) int64 token ids of a step; the same in every process."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(
            0, self.config.get_text_config().vocab_size, (self.rows, self.seq_len), generator=generator
        )


def draw_weight(name: str, shape: torch.Size, device: str) -> Tensor:
    """The bfloat16 start value of a parameter by its Hugging Face name: N(0, 0.02), norms 1, biases 0."""
    if len(shape) < 2:
        return torch.full(shape, 1.0 if name.endswith("norm.weight") else 0.0, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * 0.02


def resident_bytes() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def shared_resident_bytes() -> int:
    """Of `resident_bytes`, what other processes may map too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0]) * 1024


def used_host_bytes() -> int:
    """Memory in use on the whole machine; unlike `resident_bytes` it holds what the CUDA driver page-locked itself."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(lines["MemTotal"].split()[0]) - int(lines["MemAvailable"].split()[0])) * 1024


class Clock:
    """Marks in the work of a device: CUDA events of the current stream, or the time itself on CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def mark(self) -> "torch.cuda.Event | float":
        """A mark behind the work launched so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
        """Time between two marks; waits for the later one."""
        if not self._cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        """Wait for the whole device."""
        if self._cuda:
            torch.cuda.synchronize()

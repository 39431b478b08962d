"""Predicts a step on several GPUs of one host from ceilings measured on one and two: a prediction, no measurement.

    python benchmarks/several_gpus.py --model qwen2.5-7b --rows 64 --seq-len 1024

Arithmetic and copies are those of one rank's share of the rows. The ranks share the host's memory: in the forward pass
all of them read the weights while AdamW moves 26 bytes per parameter; in the backward pass they read the weights again
and write the gradients, once in all. AdamW is hidden behind the forward pass only. `read once`: each GPU
reads 1/N of the weights from the host and gets the rest from the other GPUs.
"""

import argparse
import dataclasses
import math

from ceilings import Ceilings
from shapes import model_config

from megatrain_verl.model_sizes import ModelSizes

# docs/experiments.md: H2D and D2H, both at once, a product while both copy, AdamW of 16 cores and the GPU together.
ONE_GPU = Ceilings(55.1e9, 55.1e9, 48.6e9, 796e12, 730e12, {"native": 5.8e9})
PEER = 395e9  # bytes/s from one GPU to another over NVLink
ADAMW_BYTES = 26  # of host memory per parameter: `megatrain_verl/streaming/native_adamw.py`
MEMORY = ONE_GPU.adamw["native"] * ADAMW_BYTES  # bytes/s of a host with one GPU, the most that was seen


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a step on `gpus`, times the speed of one GPU, and the seconds that each limit costs."""

    gpus: int
    seconds: float
    speedup: float
    saved: dict[str, float]

    @property
    def saturated(self) -> str | None:
        """The limit that would save most; None if arithmetic is all."""
        most = max(self.saved, key=self.saved.get)
        return most if self.saved[most] > 0.005 * self.seconds else None


def step_seconds(
    sizes: ModelSizes, tokens: int, gpus: int, memory: float, *, once: bool = False, links: float = 1.0
) -> float:
    """Seconds of a step of `tokens` in all: each pass takes as long as what takes longest in it.

    Args:
        memory: bytes/s of the host's memory.
        once: the weights are read from it once, not by each GPU.
        links: how many times as fast PCIe and NVLink are.
    """
    weights, rate = 2 * sum(sizes.unit_sizes), ONE_GPU.matmul_while_copying
    own, all_read = (weights / gpus, weights) if once else (weights, gpus * weights)
    across = weights * (gpus - 1) / gpus / PEER / links if once else 0.0
    layers, head = (parameters * tokens / gpus for parameters in (sizes.active_layer_parameters, sizes.head_parameters))
    forward = max(
        2 * (layers + head) / rate,
        own / ONE_GPU.h2d / links,
        across,
        (all_read + ADAMW_BYTES * sizes.num_parameters) / memory,
    )
    backward = max((6 * layers + 4 * head) / rate, own / ONE_GPU.both / links, across, (all_read + weights) / memory)
    return forward + backward


def predict(sizes: ModelSizes, tokens: int, gpus: int, memory: float, *, once: bool = False) -> Prediction:
    """The step of `tokens` in all, against that of one GPU with the memory rate of its host."""
    step = step_seconds(sizes, tokens, gpus, memory, once=once)
    saved = {
        "host memory": step - step_seconds(sizes, tokens, gpus, math.inf, once=once),
        "PCIe": step - step_seconds(sizes, tokens, gpus, memory, once=once, links=math.inf),
    }
    return Prediction(gpus, step, step_seconds(sizes, tokens, 1, MEMORY) / step, saved)


def main() -> None:
    """Print a row for each number of GPUs and each assumption about the host's memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b", help="a name of shapes.py, or a folder with config.json")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    sizes, tokens = ModelSizes.of(model_config(arguments.model, None)), arguments.rows * arguments.seq_len
    print("| GPUs | host memory | step | times one GPU | saturated first | read once: times one GPU |")
    print("|---|---|---|---|---|---|")
    for gpus in arguments.gpus:
        for memory in sorted({MEMORY, gpus * MEMORY}):
            found = predict(sizes, tokens, gpus, memory)
            limit = "-" if found.saturated is None else f"{found.saturated}: {found.saved[found.saturated]:.2f} s"
            once = predict(sizes, tokens, gpus, memory, once=True)
            times = f"{found.seconds:.2f} s | {found.speedup:.2f} | {limit} | {once.speedup:.2f}"
            print(f"| {gpus} | {memory / 1e9:.0f} GB/s | {times} |")


if __name__ == "__main__":
    main()

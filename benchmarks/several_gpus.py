"""Predicts a step on several GPUs of one host from ceilings measured on one and two: a prediction, no measurement.

    python benchmarks/several_gpus.py --model qwen2.5-7b --rows 64 --seq-len 1024

The bound is that of `step_time.py`, for one rank's share of the rows. What the ranks share is the host's memory: every
rank reads all weights and sends its part of the gradients, and AdamW reads and writes 26 bytes per parameter.
"""

import argparse
import dataclasses
import math

from ceilings import Bound, Ceilings
from shapes import model_config

from megatrain_verl.model_sizes import ModelSizes

# docs/experiments.md: H2D and D2H, both at once, a product while both copy, AdamW of 16 cores and the GPU together.
ONE_GPU = Ceilings(55.1e9, 55.1e9, 48.6e9, 796e12, 730e12, {"native": 5.8e9})
ADAMW_BYTES = 26  # of host memory per parameter: `megatrain_verl/streaming/native_adamw.py`
MEMORY = ONE_GPU.adamw["native"] * ADAMW_BYTES  # bytes/s of a host with one GPU, the most that was seen
LIFTED = {  # by the name of what the ranks share: it is no limit any more
    "transfers": {"h2d": math.inf, "both": math.inf},
    "AdamW": {"adamw": {"native": math.inf}},
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a step on `gpus`, times the speed of one GPU, and the seconds that each shared limit costs."""

    gpus: int
    seconds: float
    speedup: float
    saved: dict[str, float]

    @property
    def saturated(self) -> str | None:
        """The limit that would save most; None if arithmetic, which the ranks do not share, is all."""
        most = max(self.saved, key=self.saved.get)
        return most if self.saved[most] > 0.005 * self.seconds else None


def ceilings(gpus: int, memory: float) -> Ceilings:
    """Those of one of `gpus` ranks on a host whose memory moves `memory` bytes/s; AdamW is that of all together.

    Copies of all ranks at once: each reads the weights; in the backward pass it also writes 1/gpus of the gradients.
    """
    return dataclasses.replace(
        ONE_GPU,
        h2d=min(ONE_GPU.h2d, memory / gpus),
        both=min(ONE_GPU.both, memory / (gpus + 1)),
        adamw={"native": min(gpus * ONE_GPU.adamw["native"], memory / ADAMW_BYTES)},
    )


def predict(sizes: ModelSizes, tokens: int, gpus: int, memory: float) -> Prediction:
    """The step of `tokens` in all, AdamW hidden behind the forward pass only."""
    here = ceilings(gpus, memory)

    def seconds(limits: Ceilings, share: int) -> float:
        return Bound.of(sizes, tokens // share, limits, "native").adamw_behind_forward

    step = seconds(here, gpus)
    saved = {name: step - seconds(dataclasses.replace(here, **lifted), gpus) for name, lifted in LIFTED.items()}
    return Prediction(gpus, step, seconds(ceilings(1, MEMORY), 1) / step, saved)


def main() -> None:
    """Print a row for each number of GPUs and each assumption about the host's memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b", help="a name of shapes.py, or a folder with config.json")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    sizes, tokens = ModelSizes.of(model_config(arguments.model, None)), arguments.rows * arguments.seq_len
    print("| GPUs | host memory | step | times one GPU | saturated first |")
    print("|---|---|---|---|---|")
    for gpus in arguments.gpus:
        for memory in sorted({MEMORY, gpus * MEMORY}):
            found = predict(sizes, tokens, gpus, memory)
            limit = "-" if found.saturated is None else f"{found.saturated}: {found.saved[found.saturated]:.2f} s"
            print(f"| {gpus} | {memory / 1e9:.0f} GB/s | {found.seconds:.2f} s | {found.speedup:.2f} | {limit} |")


if __name__ == "__main__":
    main()

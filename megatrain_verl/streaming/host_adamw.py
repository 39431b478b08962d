"""AdamW on the host, one unit's arenas at a time: the native kernel, DeepSpeed's CPUAdam or torch's fused AdamW.

All compute the float32 update of `torch.optim.AdamW` and depend on the step's numbers only: a resumed run continues
bit for bit. On an H200's 16-core host the native kernel updates 4.2e9 split parameters per second, the others 5.5e8
(docs/experiments.md; `benchmarks/step_time.py` measures them).
"""

import functools
import itertools
import logging
import os
import threading
from collections.abc import Iterator

from megatrain_verl.config import OPTIMIZER_BACKENDS
from megatrain_verl.streaming.chunked_adamw import ChunkedAdamW, TorchKernel, deepspeed_kernel
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.model_units import UnitPlan
from megatrain_verl.streaming.native_adamw import NativeAdamW
from megatrain_verl.streaming.optimizer_step import AdamWStep

logger = logging.getLogger(__name__)


class HostAdamW:
    """Updates the master weights and moments of a unit.

    Args:
        backend: "auto" (native, or torch with one warning if it cannot be compiled), "native", "deepspeed" or
            "torch". `self.backend` is the one in use.
        threads: of the update; None takes every core this process may use.

    Raises:
        ValueError: an unknown backend, or the one asked for cannot be loaded.
    """

    def __init__(self, backend: str = "auto", threads: int | None = None) -> None:
        if backend not in OPTIMIZER_BACKENDS:
            raise ValueError(f"optimizer_backend must be one of {', '.join(OPTIMIZER_BACKENDS)}, got {backend!r}")
        self.threads = threads or usable_cores()
        self._kernel = _make_kernel(backend, self.threads)
        self.backend: str = self._kernel.name
        self._thread = threading.local()

    @property
    def native(self) -> NativeAdamW | None:
        """The native kernel, if that is the one in use."""
        return self._kernel if isinstance(self._kernel, NativeAdamW) else None

    def update(
        self,
        unit: UnitState,
        step: AdamWStep,
        into: UnitState | None = None,
        *,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """One AdamW step on `unit` from its gradient, which is left as it is; the reference is kept before that.

        With `into` the results go to its arenas and those of `unit` stay as they are. Only elements [start, end) are
        updated, both multiples of 64. May be called from any thread, but from one at a time.
        """
        # Each thread has its own OpenMP setting and starts from OMP_NUM_THREADS (1 under Ray and torchrun), whatever
        # the main thread has set.
        if not hasattr(self._thread, "started"):
            self._kernel.start_thread()
            self._thread.started = True
        unit.keep_reference()
        for first, last, decayed in decay_runs(unit.plan, everything=step.decay_norms_and_biases, start=start, end=end):
            self._kernel.update(unit, into or unit, first, last, step, step.weight_decay if decayed else 0.0)

    def finished(self) -> int:
        """How many pieces of units have been updated."""
        return self._kernel.pieces

    def close(self) -> None:
        """Release the kernel's own state."""
        self._kernel.close()


def _make_kernel(backend: str, threads: int) -> NativeAdamW | ChunkedAdamW:
    if backend == "torch":
        return ChunkedAdamW(TorchKernel(), threads)
    if backend == "deepspeed":
        return ChunkedAdamW(deepspeed_kernel(), threads)
    try:
        return NativeAdamW(threads)
    except OSError as error:
        if backend == "native":
            raise ValueError(f"optimizer_backend=native: {error}; install a C compiler or set torch") from error
        _warn_fallback(str(error))
        return ChunkedAdamW(TorchKernel(), threads)


@functools.cache
def _warn_fallback(cause: str) -> None:
    logger.warning("the native AdamW kernel cannot be used, torch's fused AdamW updates the weights: %s", cause)


def usable_cores() -> int:
    """Cores this process may run on; unlike `os.cpu_count` it honours taskset, cgroup cpusets and Slurm."""
    return len(os.sched_getaffinity(0))


def decay_runs(
    plan: UnitPlan, *, everything: bool, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, int, bool]]:
    """(first, last, decayed) of the longest trained runs in [start, end) of `plan` that are all decayed or all not.

    Without `everything`, one-dimensional parameters are not. Alignment padding joins the parameter before it: it is
    zero and stays so.
    """
    spans = [span for span in plan.spans if span.trainable]
    ends = [*(span.offset for span in spans[1:]), plan.trained]
    parts = zip(spans, ends, strict=False)  # nothing at all in a frozen unit
    for decayed, group in itertools.groupby(parts, key=lambda part: everything or len(part[0].shape) > 1):
        group = list(group)
        first = max(group[0][0].offset, start)
        last = group[-1][1] if end is None else min(group[-1][1], end)
        if first < last:
            yield first, last, decayed

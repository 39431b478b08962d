"""The native host AdamW: `native/adamw.c`, compiled once per machine and called by a pool of threads.

It reads gradient, moments and split master once and writes them once: 26 bytes per parameter, which is what the
host's memory can do and no more. ctypes releases the GIL during a call.
"""

import ctypes
import functools
import hashlib
import logging
import math
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.optimizer_step import AdamWStep

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).parent / "native" / "adamw.c"
# Without contraction the compiler adds no fused multiply-add: the kernel on the device computes the same bits.
FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
LEVELS = ("plain", "AVX2", "AVX-512")
LINE = 64  # elements; slices of different threads share no cache line in any arena
PIECE = 16 << 20  # elements of a slice at most: some 0.1 s of one core, after which others see that the update goes on


class Settings(ctypes.Structure):
    """The numbers of one update, as the C code takes them."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "one_minus_lr_decay",
            "one_minus_beta1",
            "beta2",
            "one_minus_beta2",
            "step_size",
            "inv_sqrt_bias2",
            "eps",
            "grad_scale",
        )
    ]

    @classmethod
    def of(cls, step: AdamWStep, weight_decay: float) -> "Settings":
        """The numbers of `step`, computed in double precision and rounded once."""
        beta1, beta2 = step.betas
        return cls(
            one_minus_lr_decay=1 - step.lr * weight_decay,
            one_minus_beta1=1 - beta1,
            beta2=beta2,
            one_minus_beta2=1 - beta2,
            step_size=step.lr / (1 - beta1**step.step),
            inv_sqrt_bias2=1 / math.sqrt(1 - beta2**step.step),
            eps=step.eps,
            grad_scale=step.grad_scale,
        )


class Arenas(ctypes.Structure):
    """Addresses of the first element of a slice, as the C code takes them."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("master", "high", "low", "m", "v")]

    @classmethod
    def of(cls, unit: UnitState, start: int) -> "Arenas":
        """Those of `unit` from element `start` on."""

        def address(arena: Tensor) -> int:
            return arena.data_ptr() + start * arena.element_size()

        weight = {"master": address(unit.weight)}
        if unit.low is not None:
            weight = {"high": address(unit.weight), "low": address(unit.low)}
        return cls(**weight, m=address(unit.exp_avg), v=address(unit.exp_avg_sq))


class NativeAdamW:
    """Calls the compiled update on slices of a unit, as many for each thread.

    `pieces`: slices updated so far.

    Args:
        threads: of the pool.
        level: instruction set, an index of `LEVELS`; None takes the best this processor has.

    Raises:
        OSError: no C compiler, or it failed; the message has its output.
    """

    name = "native"

    def __init__(self, threads: int, level: int | None = None) -> None:
        self._library = _load()
        self.level = self._library.adamw_best_level() if level is None else level
        self._threads, self.pieces = threads, 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="native AdamW")

    def start_thread(self) -> None:
        """Nothing to do: the threads are the pool's own."""

    def update(
        self, unit: UnitState, into: UnitState, start: int, end: int, step: AdamWStep, weight_decay: float
    ) -> None:
        """Update elements [start, end) of the arenas of `unit`, writing those of `into` (which may be `unit`)."""
        self.update_slices(unit, into, start, end, Settings.of(step, weight_decay))

    def update_slices(self, unit: UnitState, into: UnitState, start: int, end: int, settings: Settings) -> None:
        """The same with the numbers of the update given."""
        lines = -(-(end - start) // LINE)
        rounds = -(-(end - start) // (self._threads * PIECE))
        share = -(-lines // (self._threads * rounds)) * LINE
        slices = [(first, min(first + share, end)) for first in range(start, end, share)]
        for done in [self._pool.submit(self._update_slice, unit, into, *part, settings) for part in slices]:
            done.result()
            self.pieces += 1

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _update_slice(self, unit: UnitState, into: UnitState, start: int, end: int, settings: Settings) -> None:
        self._library.adamw_update(
            self.level,
            ctypes.byref(settings),
            ctypes.c_int64(end - start),
            ctypes.byref(Arenas.of(unit, start)),
            ctypes.byref(Arenas.of(into, start)),
            ctypes.c_void_p(unit.grad.data_ptr() + start * unit.grad.element_size()),
            int(unit.grad.dtype is torch.bfloat16),
        )


@functools.cache
def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_compile()))
    library.adamw_update.restype = None
    return library


def _compile() -> Path:
    """The shared library of this source, from the user's cache or compiled into it (under a second)."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + " ".join(FLAGS).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain_verl"
    target = cache / f"adamw-{key}.so"
    if target.exists():
        return target
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler found (cc, gcc or clang, or the one named by CC)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / target.name
        command = [compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}")
        built.replace(target)  # another process may have been faster; both files are the same
    logger.info("compiled the native AdamW kernel into %s", target)
    return target

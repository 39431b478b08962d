"""AdamW on the host, one unit's arenas at a time, by DeepSpeed's CPUAdam kernel or torch's fused AdamW.

Both compute the same float32 update as `torch.optim.AdamW` (see `_DeepSpeedKernel` for where DeepSpeed rounds), and
both depend on the step's numbers only: a resumed run continues bit for bit.
"""

import ctypes
import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatrain_verl.config import OPTIMIZER_BACKENDS
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.master_weights import join_master, split_master
from megatrain_verl.streaming.model_plan import UnitPlan

logger = logging.getLogger(__name__)

# Parameters per call and thread: a thread's part of the chunk (masters, gradients, moments) stays in its core's cache
# between join, kernel and split, and is above the size at which torch uses another thread.
PARAMETERS_PER_THREAD = 1 << 17
# DeepSpeed's binding holds the GIL for the whole call, which must not stop the other threads for long.
MAX_CHUNK = 4 << 20


@dataclass(frozen=True)
class AdamWStep:
    """The hyper-parameters of one optimizer step, frozen when it starts: its units are updated later, one by one."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    # 1 for the first update.
    step: int
    # Factor on every gradient: clipping, and the loss scaling if there is any.
    grad_scale: float
    # False leaves one-dimensional parameters (norms, biases) without decay.
    decay_norms_and_biases: bool


class HostAdamW:
    """Updates the master weights and moments of a unit in place.

    Args:
        backend: "auto" (DeepSpeed, or torch with one warning if DeepSpeed's kernel cannot be loaded), "deepspeed" or
            "torch". `self.backend` is the one in use.
        threads: OpenMP threads of the update; None takes every core this process may use.

    Raises:
        ValueError: an unknown backend, or "deepspeed" was asked for and cannot be loaded.
    """

    def __init__(self, backend: str = "auto", threads: int | None = None) -> None:
        if backend not in OPTIMIZER_BACKENDS:
            raise ValueError(f"optimizer_backend must be one of {', '.join(OPTIMIZER_BACKENDS)}, got {backend!r}")
        self.threads = threads or usable_cores()
        self._kernel = _TorchKernel() if backend == "torch" else _deepspeed_kernel(required=backend == "deepspeed")
        self.backend: str = self._kernel.name
        self._thread = threading.local()
        self._chunk = chunk_size(self.threads)
        self._master, self._grad = torch.empty(2, self._chunk, dtype=torch.float32)

    def update(self, unit: UnitState, step: AdamWStep) -> None:
        """One AdamW step on `unit` from its gradient, which is left as it is; the reference is kept before that.

        May be called from any thread, but from one at a time.
        """
        self._size_thread_pool()
        unit.keep_reference()
        for start, end, decayed in decay_runs(unit.plan, everything=step.decay_norms_and_biases):
            for first in range(start, end, self._chunk):
                part = slice(first, min(first + self._chunk, end))
                self._update_chunk(unit, part, step, step.weight_decay if decayed else 0.0)

    def close(self) -> None:
        """Release the kernel's own state."""
        self._kernel.close()

    def _size_thread_pool(self) -> None:
        # Each thread has its own OpenMP setting and starts from OMP_NUM_THREADS (1 under Ray and torchrun), whatever
        # the main thread has set.
        if not hasattr(self._thread, "sized"):
            self._kernel.set_threads(self.threads)
            self._thread.sized = True

    def _update_chunk(self, unit: UnitState, part: slice, step: AdamWStep, weight_decay: float) -> None:
        size = part.stop - part.start
        grad = unit.grad[part]
        if grad.dtype is not torch.float32 or step.grad_scale != 1.0:
            grad = self._grad[:size].copy_(grad).mul_(step.grad_scale)
        master, split = unit.weight[part], unit.low is not None
        if split:
            master = join_master(unit.weight[part], unit.low[part], self._master[:size])
        self._kernel.update(master, grad, unit.exp_avg[part], unit.exp_avg_sq[part], step, weight_decay)
        if split:
            split_master(master, unit.weight[part], unit.low[part])


def usable_cores() -> int:
    """Cores this process may run on; unlike `os.cpu_count` it honours taskset, cgroup cpusets and Slurm."""
    return len(os.sched_getaffinity(0))


def chunk_size(threads: int) -> int:
    """Parameters that are updated in one kernel call on `threads` threads. The result does not depend on it."""
    return min(MAX_CHUNK, threads * PARAMETERS_PER_THREAD)


def decay_runs(plan: UnitPlan, *, everything: bool) -> Iterator[tuple[int, int, bool]]:
    """(start, end, decayed) of the longest runs of `plan`'s arenas with one answer to "is this decayed?".

    Without `everything`, one-dimensional parameters are not. Alignment padding joins the parameter before it: it is
    zero and stays so.
    """
    ends = [span.offset for span in plan.spans[1:]] + [plan.numel]
    parts = zip(plan.spans, ends, strict=True)
    for decayed, group in itertools.groupby(parts, key=lambda part: everything or len(part[0].shape) > 1):
        (first, end), *rest = group
        yield first.offset, rest[-1][1] if rest else end, decayed


class _TorchKernel:
    """torch's fused CPU AdamW."""

    name = "torch"

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def update(
        self, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamWStep, weight_decay: float
    ) -> None:
        torch._fused_adamw_(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(step.step))],
            lr=step.lr,
            beta1=step.betas[0],
            beta2=step.betas[1],
            weight_decay=weight_decay,
            eps=step.eps,
            amsgrad=False,
            maximize=False,
        )

    def close(self) -> None:
        pass


class _DeepSpeedKernel:
    """DeepSpeed's CPUAdam kernel.

    Its bias correction multiplies the betas up from call to call in float32, so that a resumed run would differ in
    the last bit from a straight one. It is therefore switched off and folded, in double precision, into the numbers
    of the call. With c1 = 1 - beta1^t and c2 = 1 - beta2^t,

        lr / c1 * m / (sqrt(v / c2) + eps)  =  (lr sqrt(c2) / c1) * m / (sqrt(v) + eps sqrt(c2)).

    The kernel takes the betas as float32, hence 1 - beta2 with a relative error of 1e-5 for beta2 = 0.999. The same
    constant error is in v and, since c2 is computed from the rounded beta too, cancels in the update.
    """

    name = "deepspeed"

    def __init__(self, module: ModuleType) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self._module = module
        # DeepSpeed numbers its optimizers in this process by this counter; taking from it keeps both sides apart.
        self._id = DeepSpeedCPUAdam.optimizer_id
        DeepSpeedCPUAdam.optimizer_id += 1
        adamw_mode, log = True, False
        module.create_adam(self._id, 0.0, 0.9, 0.999, 1e-8, 0.0, adamw_mode, log)

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)  # for the conversions around the kernel
        # The extension may be linked to another libgomp than torch is; looked up through the extension, the function
        # is that of the runtime it really uses.
        ctypes.CDLL(self._module.__file__).omp_set_num_threads(threads)

    def update(
        self, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: AdamWStep, weight_decay: float
    ) -> None:
        beta1, beta2 = (ctypes.c_float(beta).value for beta in step.betas)
        correction1, correction2 = 1 - beta1**step.step, math.sqrt(1 - beta2**step.step)
        lr = step.lr * correction2 / correction1
        decay = weight_decay * correction1 / correction2  # the kernel multiplies it by its own lr
        unused_step, correct_bias = 1, False
        self._module.adam_update(
            self._id,
            unused_step,
            lr,
            beta1,
            beta2,
            step.eps * correction2,
            decay,
            correct_bias,
            master,
            grad,
            exp_avg,
            exp_avg_sq,
        )

    def close(self) -> None:
        self._module.destroy_adam(self._id)


def _deepspeed_kernel(*, required: bool) -> _DeepSpeedKernel | _TorchKernel:
    module, cause = _load_cpu_adam()
    if module is not None:
        return _DeepSpeedKernel(module)
    if required:
        raise ValueError(
            f"DeepSpeed's CPUAdam kernel cannot be used ({cause}); install deepspeed and a C++ compiler, "
            "or set optimizer_backend=torch"
        )
    _warn_fallback(cause)
    return _TorchKernel()


@functools.cache
def _load_cpu_adam() -> tuple[ModuleType | None, str]:
    """DeepSpeed's compiled module, or None and why not. Built once per machine and once tried per process."""
    logger.info("loading DeepSpeed's CPUAdam kernel; its first use on a machine compiles it, for about a minute")
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        return CPUAdamBuilder().load(), ""
    except Exception as error:  # import, compiler, ninja and loader each fail in their own way
        return None, f"{type(error).__name__}: {error}"


@functools.cache
def _warn_fallback(cause: str) -> None:
    logger.warning("DeepSpeed's CPUAdam kernel cannot be used, torch's fused AdamW updates the weights: %s", cause)

"""DeepSpeed's and torch's AdamW kernels, which update float32 chunks: the alternatives to the native kernel.

Both want a float32 master and gradient, so a chunk of a split master is joined before and split after; that, and not
the kernels, takes most of their time.
"""

import ctypes
import functools
import logging
import math
from types import ModuleType

import torch
from torch import Tensor

from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.master_weights import join_master, split_master
from megatrain_verl.streaming.optimizer_step import AdamWStep

logger = logging.getLogger(__name__)

# Parameters per call and thread: a thread's part of the chunk (masters, gradients, moments) stays in its core's cache
# between join, kernel and split, and is above the size at which torch uses another thread.
PARAMETERS_PER_THREAD = 1 << 17
# DeepSpeed's binding holds the GIL for the whole call, which must not stop the other threads for long.
MAX_CHUNK = 4 << 20


class ChunkedAdamW:
    """Runs a float32 kernel over chunks of a unit. The result does not depend on the size of the chunks.

    `pieces`: chunks updated so far.
    """

    def __init__(self, kernel: "TorchKernel | DeepSpeedKernel", threads: int) -> None:
        self.name = kernel.name
        self._kernel, self._threads, self.pieces = kernel, threads, 0
        self._chunk = chunk_size(threads)
        self._master, self._grad = torch.empty(2, self._chunk, dtype=torch.float32)

    def start_thread(self) -> None:
        """Called once in each thread that updates: size its OpenMP team."""
        self._kernel.set_threads(self._threads)

    def update(
        self, unit: UnitState, into: UnitState, start: int, end: int, step: AdamWStep, weight_decay: float
    ) -> None:
        """Update elements [start, end) of the arenas of `unit`, writing those of `into` (which may be `unit`)."""
        for first in range(start, end, self._chunk):
            part = slice(first, min(first + self._chunk, end))
            if into is not unit:  # the kernels work in place
                for target, source in zip(into.trained(), unit.trained(), strict=True):
                    target[part].copy_(source[part])
            self._update_chunk(into, unit.grad[part], part, step, weight_decay)
            self.pieces += 1

    def close(self) -> None:
        """Release the kernel's own state."""
        self._kernel.close()

    def _update_chunk(self, unit: UnitState, grad: Tensor, part: slice, step: AdamWStep, weight_decay: float) -> None:
        size = part.stop - part.start
        if grad.dtype is not torch.float32 or step.grad_scale != 1.0:
            grad = self._grad[:size].copy_(grad).mul_(step.grad_scale)
        master, split = unit.weight[part], unit.low is not None
        if split:
            master = join_master(unit.weight[part], unit.low[part], self._master[:size])
        self._kernel.update(master, grad, unit.exp_avg[part], unit.exp_avg_sq[part], step, weight_decay)
        if split:
            split_master(master, unit.weight[part], unit.low[part])


def chunk_size(threads: int) -> int:
    """Parameters that are updated in one kernel call on `threads` threads."""
    return min(MAX_CHUNK, threads * PARAMETERS_PER_THREAD)


class TorchKernel:
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


class DeepSpeedKernel:
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


def deepspeed_kernel() -> DeepSpeedKernel:
    """DeepSpeed's kernel.

    Raises:
        ValueError: it cannot be loaded; names the cause and the remedy.
    """
    module, cause = _load_cpu_adam()
    if module is None:
        raise ValueError(
            f"DeepSpeed's CPUAdam kernel cannot be used ({cause}); install deepspeed and a C++ compiler, "
            "or set optimizer_backend=torch"
        )
    return DeepSpeedKernel(module)


@functools.cache
def _load_cpu_adam() -> tuple[ModuleType | None, str]:
    """DeepSpeed's compiled module, or None and why not. Built once per machine and once tried per process."""
    logger.info("loading DeepSpeed's CPUAdam kernel; its first use on a machine compiles it, for about a minute")
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder

        return CPUAdamBuilder().load(), ""
    except Exception as error:  # import, compiler, ninja and loader each fail in their own way
        return None, f"{type(error).__name__}: {error}"

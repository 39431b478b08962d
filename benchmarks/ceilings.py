"""What the machine can do, measured in the same run as the steps: copies, matrix products, host AdamW."""

import time
from dataclasses import dataclass

import torch

from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.model_plan import ModelPlan, ParameterSpan, UnitPlan
from megatrain_verl.streaming.optimizer_step import AdamWStep

ADAM_PARAMETERS = 100_000_000


@dataclass
class Ceilings:
    """Bytes/s of page-locked copies, FLOP/s of an 8192^3 bfloat16 product, parameters/s of each AdamW backend."""

    h2d: float
    d2h: float
    matmul: float
    adamw: dict[str, float]


def measure(backends: tuple[str, ...] = ("native", "deepspeed", "torch")) -> Ceilings:
    """All ceilings of this machine; about ten seconds."""
    host = HostBuffer(1 << 30, "copy benchmark", shared=False, register=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    h2d = host.nbytes / _seconds(lambda: device.copy_(host.tensor, non_blocking=True))
    d2h = host.nbytes / _seconds(lambda: host.tensor.copy_(device, non_blocking=True))
    host.close()
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    matmul = 2 * 8192**3 / _seconds(lambda: left @ right, repeats=20)
    return Ceilings(h2d, d2h, matmul, {name: _adamw_rate(name) for name in backends})


def bound_seconds(plan: ModelPlan, tokens: int, ceilings: Ceilings, backend: str, hidden_adamw: bool) -> float:
    """Least step time of the layer-major order: forward + backward, each the larger of arithmetic and transfers.

    AdamW hides behind the forward pass (`hidden_adamw` False: what is left of it counts) or altogether.
    """
    layers = sum(span.numel for unit in plan.layers for span in unit.spans)
    head = plan.config.vocab_size * plan.config.hidden_size
    streamed = 2 * sum(unit.numel for unit in plan.units)  # bytes, bfloat16
    forward = max(2 * (layers + head) * tokens / ceilings.matmul, streamed / ceilings.h2d)
    backward = max((6 * layers + 4 * head) * tokens / ceilings.matmul, streamed / ceilings.h2d, streamed / ceilings.d2h)
    adamw = plan.num_parameters / ceilings.adamw[backend]
    return max(forward + backward, adamw) if hidden_adamw else max(forward, adamw) + backward


def _seconds(work, repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def _adamw_rate(backend: str) -> float:
    span = ParameterSpan("weight", "weight", torch.Size((ADAM_PARAMETERS // 1000, 1000)), 0)
    kinds = {"weight": torch.bfloat16, "low": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    kinds["grad"] = torch.bfloat16
    buffers = {kind: HostBuffer(ADAM_PARAMETERS * dtype.itemsize, kind, shared=False, register=False)
               for kind, dtype in kinds.items()}  # fmt: skip
    unit = UnitState(
        UnitPlan("benchmark", [span], ADAM_PARAMETERS),
        **{kind: buffers[kind].view(dtype) for kind, dtype in kinds.items()},
    )
    unit.grad.normal_(0, 1e-2)
    adamw = HostAdamW(backend)
    step = AdamWStep(1e-3, (0.9, 0.999), 1e-8, 0.1, 1, 0.5, True)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        adamw.update(unit, step)
        times.append(time.perf_counter() - start)
    adamw.close()
    return ADAM_PARAMETERS / sorted(times)[1]

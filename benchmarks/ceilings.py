"""What the machine can do, measured in the same run as the steps: copies, matrix products, host AdamW."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain_verl.model_sizes import ModelSizes
from megatrain_verl.streaming.host_adamw import HostAdamW
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.model_units import ParameterSpan, UnitPlan
from megatrain_verl.streaming.optimizer_step import AdamWStep

BACKENDS = ("native", "deepspeed", "torch")
ADAM_PARAMETERS = 200_000_000
COPY_BYTES = 1 << 30
MATRIX = 8192


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s of page-locked copies, FLOP/s of a bfloat16 product, parameters/s of host AdamW by backend.

    `both` is the rate of each direction while both copy; `matmul_while_copying` the product's rate meanwhile. On a
    machine without a GPU these are None. An AdamW backend that cannot run has its error instead of a rate.
    """

    h2d: float | None
    d2h: float | None
    both: float | None
    matmul: float | None
    matmul_while_copying: float | None
    adamw: dict[str, float | str]

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rates = ", ".join(
            f"{name} {rate / 1e9:.2f}e9/s" if isinstance(rate, float) else f"{name} failed: {rate}"
            for name, rate in self.adamw.items()
        )
        if self.h2d is None:
            return f"ceilings: host AdamW {rates}"
        return (
            f"ceilings: H2D {self.h2d / 1e9:.1f} GB/s, D2H {self.d2h / 1e9:.1f}, both {self.both / 1e9:.1f} each; "
            f"{MATRIX}^3 bfloat16 product {self.matmul / 1e12:.0f} TFLOP/s, while both copy "
            f"{self.matmul_while_copying / 1e12:.0f}; host AdamW {rates}"
        )


def measure(device: str) -> Ceilings:
    """All ceilings of this machine; under half a minute, a first compilation of DeepSpeed's kernel not counted."""
    if device == "cuda":
        return Ceilings(*_device_rates(), adamw=_adamw_rates(ADAM_PARAMETERS))
    return Ceilings(*[None] * 5, adamw=_adamw_rates(ADAM_PARAMETERS // 100))


@dataclass(frozen=True)
class Bound:
    """Least seconds of a step of the layer-major order: AdamW hidden behind the forward pass only, and altogether."""

    adamw_behind_forward: float
    adamw_hidden: float

    @classmethod
    def of(cls, sizes: ModelSizes, tokens: int, ceilings: Ceilings, backend: str) -> "Bound":
        """Forward and backward each take the larger of arithmetic and transfers.

        Of a mixture of experts the arithmetic counts the active layer parameters. The head has no recompute.
        """
        layers, head = sizes.active_layer_parameters * tokens, sizes.head_parameters * tokens
        nbytes = 2 * sum(sizes.unit_sizes)  # bfloat16 weights one way, gradients the other
        rate = ceilings.matmul_while_copying
        forward = max(2 * (layers + head) / rate, nbytes / ceilings.h2d)
        backward = max((6 * layers + 4 * head) / rate, nbytes / ceilings.both)
        adamw = sizes.num_parameters / ceilings.adamw[backend]
        return cls(max(forward, adamw) + backward, max(forward + backward, adamw))


def _device_rates() -> list[float]:
    """Rates in the order of the fields of `Ceilings`."""
    up, down = (HostBuffer(COPY_BYTES, "copy benchmark", register=True) for _ in range(2))
    there, back = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    left, right = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]

    def send() -> None:
        there.copy_(up.tensor, non_blocking=True)

    def receive() -> None:
        down.tensor.copy_(back, non_blocking=True)

    def together(times: int) -> None:
        for stream, copy in zip(streams, (send, receive), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(times):
                    copy()

    def join() -> None:
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def both() -> None:
        together(4)
        join()

    def multiply(times: int = 20) -> None:
        for _ in range(times):
            torch.mm(left, right)

    flops = 2 * MATRIX**3 * 20
    h2d, d2h = COPY_BYTES / _seconds(send), COPY_BYTES / _seconds(receive)
    at_once, matmul = 4 * COPY_BYTES / _seconds(both), flops / _seconds(multiply)
    # 48 copies of a GiB each way take longer than the products timed beside them.
    together(48)
    busy = flops / _seconds(multiply)
    join()
    torch.cuda.synchronize()
    for buffer in (up, down):
        buffer.close()
    return [h2d, d2h, at_once, matmul, busy]


def _seconds(work: Callable[[], None], repeats: int = 5) -> float:
    """Median device time of `work`, after one run of it."""
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


def _adamw_rates(parameters: int) -> dict[str, float | str]:
    """Parameters/s of the engine's update of one unit, by backend; the error of one that cannot run here."""
    rates: dict[str, float | str] = {}
    unit = adamw_unit(parameters)
    for backend in BACKENDS:
        try:
            adamw = HostAdamW(backend)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            rates[backend] = str(error).splitlines()[0]
            continue
        rates[backend] = _adamw_rate(adamw, unit)
        adamw.close()
    return rates


def adamw_unit(parameters: int) -> UnitState:
    """A unit of one matrix with split masters and bfloat16 gradients, all of it zero but the gradient."""
    span = ParameterSpan("weight", "weight", torch.Size((parameters // 1000, 1000)), 0)
    kinds = {"weight": torch.bfloat16, "low": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    kinds["grad"] = torch.bfloat16
    arenas = {
        kind: HostBuffer(parameters * dtype.itemsize, kind, register=False).view(dtype) for kind, dtype in kinds.items()
    }
    unit = UnitState(UnitPlan("benchmark", [span], parameters), **arenas)
    unit.grad.copy_(torch.linspace(-0.01, 0.01, parameters))
    return unit


def _adamw_rate(adamw: HostAdamW, unit: UnitState) -> float:
    times = []
    for number in range(4):
        start = time.perf_counter()
        adamw.update(unit, AdamWStep(1e-3, (0.9, 0.999), 1e-8, 0.1, number + 1, 0.5, True))
        times.append(time.perf_counter() - start)
    return unit.plan.numel / min(times[1:])

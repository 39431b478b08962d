"""The host optimizer against torch.optim.AdamW, on every kernel and both forms of master weights."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain_verl.streaming import native_adamw
from megatrain_verl.streaming.chunked_adamw import chunk_size
from megatrain_verl.streaming.host_adamw import HostAdamW, decay_runs, usable_cores
from megatrain_verl.streaming.host_store import UnitState
from megatrain_verl.streaming.master_weights import split_master
from megatrain_verl.streaming.model_units import ParameterSpan, UnitPlan
from megatrain_verl.streaming.native_adamw import LEVELS, NativeAdamW
from megatrain_verl.streaming.optimizer_step import AdamWStep

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="the kernel is compiled with cc or c++")
BACKENDS = ["torch", *(pytest.param(name, marks=needs_compiler) for name in ("native", "deepspeed"))]


def make_plan(*shapes: tuple[int, ...]) -> UnitPlan:
    """Parameters p0, p1, ... of the given shapes, aligned to 128 elements."""
    spans, offset = [], 0
    for index, shape in enumerate(shapes):
        spans.append(ParameterSpan(f"model.p{index}", f"p{index}", torch.Size(shape), offset))
        offset += -(-spans[-1].numel // 128) * 128
    return UnitPlan("unit", spans, offset)


def fill(plan: UnitPlan, std: float, seed: int) -> Tensor:
    """A float32 arena with normal values in the parameters and zeros in the padding."""
    generator, arena = torch.Generator().manual_seed(seed), torch.zeros(plan.numel)
    for span in plan.spans:
        arena[span.offset : span.offset + span.numel].normal_(std=std, generator=generator)
    return arena


def make_unit(plan: UnitPlan, master: Tensor, *, split: bool, grad_dtype: torch.dtype) -> UnitState:
    weight, low = master.clone(), None
    if split:
        weight, low = master.to(torch.bfloat16), torch.empty(plan.numel, dtype=torch.int16)
        split_master(master, weight, low)
    moments = torch.zeros(2, plan.numel)
    return UnitState(plan, weight, low, moments[0], moments[1], torch.zeros(plan.numel, dtype=grad_dtype))


def make_step(step: int, **changes: object) -> AdamWStep:
    values = {"lr": 1e-2 / step, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 1.0}
    return AdamWStep(**(values | {"step": step, "decay_norms_and_biases": True} | changes))


class TorchAdamW:
    """torch.optim.AdamW on float32 copies of a unit's parameters: the oracle."""

    def __init__(self, plan: UnitPlan, master: Tensor, *, decay_norms: bool, betas: tuple[float, float]) -> None:
        self.plan, self.master = plan, master.clone()
        self.parameters = [torch.nn.Parameter(self._part(self.master, span)) for span in plan.spans]
        groups = [
            {"params": [parameter], "weight_decay": 0.1 if decay_norms or parameter.ndim > 1 else 0.0}
            for parameter in self.parameters
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=1e-8)

    def _part(self, arena: Tensor, span: ParameterSpan) -> Tensor:
        return arena[span.offset : span.offset + span.numel].view(span.shape)

    def step(self, grad: Tensor, lr: float) -> None:
        for parameter, span, group in zip(self.parameters, self.plan.spans, self.optimizer.param_groups, strict=True):
            parameter.grad, group["lr"] = self._part(grad, span).clone(), lr
        self.optimizer.step()

    def arena(self, kind: str) -> Tensor:
        if kind == "master":
            return self.master
        values = torch.zeros(self.plan.numel)
        for parameter, span in zip(self.parameters, self.plan.spans, strict=True):
            self._part(values, span).copy_(self.optimizer.state[parameter][kind])
        return values


def max_relative_difference(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("split", "grad_dtype"), [(True, torch.bfloat16), (True, torch.float32), (False, torch.float32)]
)
@pytest.mark.parametrize("decay_norms", [True, False])
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
def test_weights_and_moments_equal_torch_adamw(
    backend: str, split: bool, grad_dtype: torch.dtype, decay_norms: bool, grad_scale: float
) -> None:
    plan = make_plan((40, 50), (77,), (64,), (128, 16), (3, 5))
    master = fill(plan, 0.02, seed=0)
    unit, optimizer = make_unit(plan, master, split=split, grad_dtype=grad_dtype), HostAdamW(backend)
    oracle = TorchAdamW(plan, master, decay_norms=decay_norms, betas=(0.9, 0.999))
    # DeepSpeed's kernel is AdamW with betas rounded to float32, which shows in its second moment (1.3e-5) alone.
    rounded = tuple(torch.tensor([0.9, 0.999]).tolist()) if backend == "deepspeed" else (0.9, 0.999)
    moments = TorchAdamW(plan, master, decay_norms=decay_norms, betas=rounded)
    for number in range(1, 13):
        unit.grad.copy_(fill(plan, 1e-2, seed=number))
        unit.view(unit.grad, plan.spans[3]).mul_(1e-6)  # of the size of eps, whose form shows here
        step = make_step(number, grad_scale=grad_scale, decay_norms_and_biases=decay_norms)
        for reference in (oracle, moments):
            reference.step(unit.grad.float() * grad_scale, step.lr)
        optimizer.update(unit, step)
    optimizer.close()

    assert max_relative_difference(unit.master(), oracle.arena("master")) < 1e-6
    assert max_relative_difference(unit.master() - master, oracle.arena("master") - master) < 2e-6
    assert max_relative_difference(unit.exp_avg, oracle.arena("exp_avg")) < 1e-6
    torch.testing.assert_close(unit.exp_avg_sq, moments.arena("exp_avg_sq"), rtol=1e-6, atol=0)
    torch.testing.assert_close(unit.exp_avg_sq, oracle.arena("exp_avg_sq"), rtol=2e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_and_padding_are_left_as_they_are(backend: str) -> None:
    plan = make_plan((7, 9), (5,))
    unit = make_unit(plan, fill(plan, 0.02, seed=0), split=True, grad_dtype=torch.float32)
    unit.grad.copy_(fill(plan, 1e-2, seed=1))
    grad = unit.grad.clone()
    HostAdamW(backend).update(unit, make_step(1, grad_scale=0.5))
    assert torch.equal(unit.grad, grad)
    assert not unit.master()[63:128].any() and not unit.exp_avg_sq[63:128].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_updates_reach_every_weight(backend: str) -> None:
    """At lr 1e-6 a bfloat16 master would move 2% of its weights."""
    plan = make_plan((64, 64))
    before = fill(plan, 0.02, seed=0)
    unit, optimizer = make_unit(plan, before, split=True, grad_dtype=torch.bfloat16), HostAdamW(backend)
    unit.grad.fill_(0.01)
    for number in range(1, 101):
        optimizer.update(unit, make_step(number, lr=1e-6, weight_decay=0.0))
    moved = (unit.master() - before).abs()
    assert (moved > 0).all()
    assert moved.mean().item() == pytest.approx(1.0e-4, rel=1e-3)

    bits = unit.master().view(torch.int32)
    half_away_from_zero = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(unit.weight, half_away_from_zero)
    differs_from_torch = unit.weight != unit.master().to(torch.bfloat16)
    assert ((bits[differs_from_torch] & 0xFFFF) == 0x8000).all()


def test_streamed_copy_rounds_ties_away_from_zero() -> None:
    master = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, -0x407F8000], dtype=torch.int32).view(torch.float32)
    plan = make_plan((4,))
    unit = make_unit(plan, torch.zeros(plan.numel), split=True, grad_dtype=torch.bfloat16)
    unit.write(plan.spans[0], master)
    assert torch.equal(unit.master(0, 4), master)
    assert unit.weight[:4].view(torch.int16).tolist() == [0x3F81, 0x3F82, 0x3F80, -0x407F]


@pytest.mark.parametrize("backend", BACKENDS)
def test_resumed_run_continues_bit_for_bit(backend: str) -> None:
    plan = make_plan((50, 40), (30,))
    straight = make_unit(plan, fill(plan, 0.02, seed=0), split=True, grad_dtype=torch.bfloat16)
    optimizer = HostAdamW(backend)
    for number in range(1, 61):
        if number == 31:
            kinds = ("weight", "low", "exp_avg", "exp_avg_sq", "grad")
            resumed = UnitState(plan, **{kind: getattr(straight, kind).clone() for kind in kinds})
            resumed_optimizer = HostAdamW(backend)
        straight.grad.copy_(fill(plan, 1e-2, seed=number))
        optimizer.update(straight, make_step(number))
        if number >= 31:
            resumed.grad.copy_(straight.grad)
            resumed_optimizer.update(resumed, make_step(number))
    for kind in ("weight", "low", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(straight, kind), getattr(resumed, kind)), kind


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [True, False])
def test_result_does_not_depend_on_threads_or_chunks(
    backend: str, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces are counted, and none is larger than it may be."""
    plan = make_plan((1000, 301), (999,))
    assert chunk_size(1) < chunk_size(2) < plan.numel
    monkeypatch.setattr(native_adamw, "PIECE", 1 << 16)
    units = []
    for threads in (1, 2):
        units.append(make_unit(plan, fill(plan, 0.02, seed=0), split=split, grad_dtype=torch.float32))
        units[-1].grad.copy_(fill(plan, 1e-2, seed=1))
        optimizer = HostAdamW(backend, threads)
        for number in range(1, 4):
            optimizer.update(units[-1], make_step(number, decay_norms_and_biases=False, grad_scale=0.5))
        piece = native_adamw.PIECE if backend == "native" else chunk_size(threads)
        assert optimizer.finished() >= 3 * plan.numel / piece
    assert torch.equal(units[0].master(), units[1].master())
    assert torch.equal(units[0].exp_avg_sq, units[1].exp_avg_sq)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_update_into_other_arenas_leaves_its_own(backend: str, split: bool) -> None:
    plan = make_plan((61, 67), (5,))
    start = fill(plan, 0.02, seed=0)
    unit, other, spare = (make_unit(plan, start, split=split, grad_dtype=torch.float32) for _ in range(3))
    spare.weight.fill_(3.0)
    adamw = HostAdamW(backend, threads=2)
    unit.grad.copy_(fill(plan, 0.01, seed=1))
    other.grad.copy_(unit.grad)
    before = [arena.clone() for arena in unit.trained()]
    adamw.update(unit, make_step(1), into=spare)
    adamw.update(other, make_step(1))
    adamw.close()
    assert all(torch.equal(arena, old) for arena, old in zip(unit.trained(), before, strict=True))
    unit.spare = spare
    unit.take_spare()
    assert all(torch.equal(arena, new) for arena, new in zip(unit.trained(), other.trained(), strict=True))
    assert all(torch.equal(arena, old) for arena, old in zip(unit.spare.trained(), before, strict=True))


@needs_compiler
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [False, True])
def test_every_instruction_set_computes_the_same_update(split: bool, grad_dtype: torch.dtype) -> None:
    plan = make_plan((61, 67), (5,))  # the slices end in the middle of vectors
    best = NativeAdamW(1).level
    results = []
    for level in range(best + 1):
        unit = make_unit(plan, fill(plan, 0.02, seed=0), split=split, grad_dtype=grad_dtype)
        native = NativeAdamW(3, level)
        for step in range(1, 4):
            unit.grad.copy_(fill(plan, 0.01, seed=step))
            native.update(unit, unit, 0, plan.numel, make_step(step, grad_scale=0.5), 0.1)
        native.close()
        results.append(unit.master())
    for level, result in enumerate(results):
        torch.testing.assert_close(result, results[0], atol=1e-8, rtol=1e-6, msg=LEVELS[level])


def test_optimizers_in_one_process_do_not_share_state() -> None:
    first, second = HostAdamW("auto"), HostAdamW("auto")
    plan = make_plan((8, 8))
    unit = make_unit(plan, fill(plan, 0.02, seed=0), split=False, grad_dtype=torch.float32)
    unit.grad.copy_(fill(plan, 1e-2, seed=1))
    second.close()
    before = unit.weight.clone()
    first.update(unit, make_step(1))
    assert not torch.equal(unit.weight, before)


def test_reference_is_kept_before_the_first_update() -> None:
    plan = make_plan((8, 8))
    unit = make_unit(plan, fill(plan, 0.02, seed=0), split=True, grad_dtype=torch.float32)
    unit.reference = torch.zeros_like(unit.weight)
    unit.grad.fill_(1.0)
    loaded = unit.weight.clone()
    optimizer = HostAdamW("torch")
    for number in (1, 2):
        optimizer.update(unit, make_step(number, lr=0.1))
    assert torch.equal(unit.source(reference=True), loaded)
    assert not torch.equal(unit.source(reference=False), loaded)


def test_decay_runs_join_neighbours() -> None:
    plan = make_plan((10, 10), (7,), (9,), (10, 10), (10, 10))
    assert list(decay_runs(plan, everything=True)) == [(0, 640, True)]
    assert list(decay_runs(plan, everything=False)) == [(0, 128, True), (128, 384, False), (384, 640, True)]


def test_chunks_stay_below_the_gil_bound() -> None:
    assert chunk_size(128) == 4 << 20


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer_backend must be one of auto, native, deepspeed, torch, got 'cuda'"):
        HostAdamW("cuda")


WITHOUT_COMPILER = """
import torch
from test_host_adamw import *
plan = make_plan((40, 50), (77,))
numbers = []
for backend in ("auto", "auto", "torch"):
    optimizer = HostAdamW(backend)
    unit = make_unit(plan, fill(plan, 0.02, seed=0), split=True, grad_dtype=torch.bfloat16)
    unit.grad.copy_(fill(plan, 0.01, seed=1))
    optimizer.update(unit, make_step(1))
    numbers.append(unit.master())
    assert optimizer.backend == "torch", optimizer.backend
    optimizer.close()
assert torch.equal(numbers[0], numbers[2])
for backend in ("deepspeed", "native"):
    try:
        HostAdamW(backend)
    except ValueError as error:
        print("refused:", error)
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_a_compiler_torch_takes_over_with_one_warning(tmp_path: Path) -> None:
    done = run_python(
        WITHOUT_COMPILER,
        PATH="",
        CC="/nonexistent",
        CXX="/nonexistent",
        TORCH_EXTENSIONS_DIR=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch's fused AdamW updates the weights") == 1, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert "refused: DeepSpeed's CPUAdam kernel cannot be used (" in done.stdout
    assert "optimizer_backend=torch" in done.stdout
    assert "refused: optimizer_backend=native: " in done.stdout


COUNT_THREADS = """
import contextlib, ctypes, threading, time
from test_host_adamw import *
optimizer = HostAdamW("{backend}")
plan = make_plan((1 << 11, 1 << 11))
unit = make_unit(plan, torch.zeros(plan.numel), split=True, grad_dtype=torch.bfloat16)
libraries = {{line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line}}

def cpu_ticks():
    found = {{}}
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found[file.parent.name] = sum(map(int, file.read_text().rsplit(")", 1)[1].split()[11:13]))
    return found

def count():
    before, worked, end = cpu_ticks(), 0, time.monotonic() + 60  # on a busy machine a thread waits for a core
    while worked < usable_cores() and time.monotonic() < end:
        for _ in range(20):
            optimizer.update(unit, make_step(1))
        taken = [ticks - before.get(task, 0) for task, ticks in cpu_ticks().items()]  # of 10 ms
        worked = sum(ticks >= max(10, max(taken) / 4) for ticks in taken)  # equal shares take equal times
    print(optimizer.backend, worked, *[ctypes.CDLL(library).omp_get_max_threads() for library in libraries])

thread = threading.Thread(target=count)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimizer_thread_uses_the_cores_it_may(backend: str) -> None:
    """Ray and torchrun set OMP_NUM_THREADS=1, from which every new thread starts."""
    done = run_python(COUNT_THREADS.format(backend=backend), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    name, worked, *threads = done.stdout.splitlines()[-1].split()
    assert name == backend and int(worked) >= usable_cores(), done.stdout
    if backend != "native":  # which has threads of its own instead of OpenMP's
        assert threads and set(threads) == {str(usable_cores())}, done.stdout

"""The device's part of AdamW gives the bits of the host's."""

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.host_store import TRAINED, UnitState
from megatrain_verl.streaming.native_adamw import NativeAdamW, Settings
from megatrain_verl.streaming.optimizer_step import AdamWStep
from tests import oracle
from tests.gpu.test_engine_cuda import distance, engine_results, medium_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTH = 1 << 20


def arenas(split, grad_dtype):
    """Weights, moments and gradients over all magnitudes, subnormal numbers and zeros among them."""
    torch.manual_seed(0)

    def spread():
        return torch.randn(LENGTH) * torch.pow(10.0, torch.rand(LENGTH) * 50 - 44)

    second = spread().abs()
    first, grad = spread(), spread()
    first[::7], second[::7], grad[::5] = 0.0, 0.0, 0.0
    state = {"exp_avg": first, "exp_avg_sq": second, "grad": grad.to(grad_dtype)}
    if not split:
        return UnitState(None, weight=spread(), **state)
    weight = torch.randn(LENGTH).bfloat16()
    return UnitState(None, weight=weight, low=torch.randint(-(1 << 15), 1 << 15, (LENGTH,)).short(), **state)


@pytest.mark.parametrize("split, grad_dtype", [(True, torch.bfloat16), (True, torch.float32), (False, torch.float32)])
def test_both_kernels_give_the_same_bits(split, grad_dtype):
    from megatrain_verl.streaming.native.adamw_triton import update

    kernel = NativeAdamW(4)
    host = arenas(split, grad_dtype)
    kinds = [kind for kind in (*TRAINED, "grad") if getattr(host, kind) is not None]
    device = UnitState(None, **{kind: getattr(host, kind).cuda() for kind in kinds})
    for number in (1, 2, 900):
        step = AdamWStep(3e-4, (0.9, 0.95), 1e-8, 0.1, number, 0.37, True)
        kernel.update(host, host, 0, LENGTH, step, 0.1)
        update(device, LENGTH, Settings.of(step, 0.1))
        for kind in kinds:
            mine, other = getattr(host, kind), getattr(device, kind).cpu()
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), (number, kind)
    kernel.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_shared_update_gives_the_masters_of_the_host_alone(dtype, monkeypatch):
    monkeypatch.setattr("megatrain_verl.streaming.device_adamw.CHUNK_ELEMENTS", 1 << 14)
    config, model = medium_model("qwen2")
    settings = {"device": "cuda", "dtype": dtype, "optimizer_backend": "native"}
    adamw = AdamWConfig(lr=1e-3, weight_decay=0.1)
    shared, alone = (
        oracle.make_engine(model.cpu(), config, adamw, device_adamw=wanted, **settings) for wanted in (True, False)
    )
    for step in range(3):
        engine_results(shared, oracle.random_rows([64] * 4, seed=step), 2)
        oracle.masters(shared)  # waits for the updates
        assert shared._updates.device_bytes > 0
        for unit, other in zip(shared.state.units, alone.state.units, strict=True):
            other.grad.copy_(unit.grad)
        alone._gradients.pending = alone._gradients._added_on_host = True  # take the norm of the copied gradients
        alone.optimizer_step()
    norm_differs = 1e-6  # the norm of one is summed on the device: both clip by nearly the same factor
    assert distance(oracle.masters(shared), oracle.masters(alone)) < norm_differs
    shared.release_device()
    assert shared._updates.device_bytes == 0
    for engine in (shared, alone):
        engine.close()

"""Packed rows through kernels that are told where rows lie: when that path is taken, and what the kernels are told.

flash-linear-attention needs a GPU (see tests/gpu/test_linear_attention_cuda.py); here torch's functions stand behind
its interface.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.utils import import_utils

from megatrain_verl.streaming.linear_attention import check_kernels, check_versions, without_kernels
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle
from tests.families.configs import family_config

LENGTHS = [11, 24, 5]
MODELS = {"Qwen3-Next-80B-A3B": modeling_qwen3_next, "Qwen3.5-27B": modeling_qwen3_5}


def convolve(x, weight, rows):
    """silu of the causal depthwise convolution of each row of `x` (1, D, T)."""
    padded = [F.pad(row, (weight.shape[1] - 1, 0)) for row in x.split(rows, dim=2)]
    return F.silu(torch.cat([F.conv1d(row, weight[:, None], groups=len(weight)) for row in padded], dim=2))


class Kernels:
    """The interfaces of flash-linear-attention and causal-conv1d over torch's functions; counts their calls."""

    def __init__(self, modeling):
        self.torch_rule, self.calls = modeling.torch_chunk_gated_delta_rule, {"rule": 0, "fla": 0, "conv1d": 0}

        def rule(query, key, value, *, g, beta, cu_seqlens, **settings):
            self.calls["rule"] += 1
            rows = cu_seqlens.diff().tolist()
            parts = zip(*(each.split(rows, dim=1) for each in (query, key, value, g, beta)), strict=True)
            outputs = [self.torch_rule(q, k, v, g=gate, beta=b, **settings)[0] for q, k, v, gate, b in parts]
            return torch.cat(outputs, dim=1), None

        rule.__module__ = "fla.ops.gated_delta_rule.chunk"
        self.rule = rule

    def fla_convolution(self, x, weight, bias, *, activation, cu_seqlens):
        self.calls["fla"] += 1
        assert bias is None and activation == "silu" and x.shape[1] == sum(LENGTHS)
        return convolve(x.transpose(1, 2), weight, cu_seqlens.diff().tolist()).transpose(1, 2), None

    def causal_conv1d_fn(self, x, weight, bias, activation, seq_idx):
        self.calls["conv1d"] += 1
        assert bias is None and activation == "silu" and seq_idx.dtype is torch.int32
        return convolve(x, weight, seq_idx[0].bincount().tolist())


@pytest.mark.parametrize("has_causal_conv1d", [False, True], ids=["alone", "with causal-conv1d"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_reach_the_kernels_with_their_boundaries(name, has_causal_conv1d, monkeypatch):
    config = family_config(name)
    model, rows = oracle.plain_model(config), oracle.random_rows(LENGTHS)
    tokens = sum(LENGTHS) - len(LENGTHS)
    loss = -torch.cat([oracle.plain_log_probs(model, row)[0] for row in rows]).sum() / tokens
    loss.backward()
    kernels = Kernels(MODELS[name])
    monkeypatch.setattr(MODELS[name], "chunk_gated_delta_rule", kernels.rule)
    if has_causal_conv1d:
        # A function, as the package's: layers are copied, and a method would be with them.
        monkeypatch.setattr(MODELS[name], "causal_conv1d_fn", lambda **named: kernels.causal_conv1d_fn(**named))
    package = ModuleType("fla.modules.convolution")
    package.causal_conv1d = kernels.fla_convolution
    for path in ("fla", "fla.modules"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setitem(sys.modules, "fla.modules.convolution", package)
    engine = oracle.make_engine(model, config)
    assert oracle.engine_pass(engine, [oracle.pack(rows)]) == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for parameter, grad in oracle.engine_gradients(engine).items():
        expected = model.get_parameter(parameter).grad
        assert (grad - expected).norm() <= 1e-3 * expected.norm() + 1e-7 * norm, parameter
    engine.close()
    linear = config.layer_types.count("linear_attention")
    used, other = ("conv1d", "fla") if has_causal_conv1d else ("fla", "conv1d")
    # Forward, and again for the backward pass, unless the layer was kept.
    assert linear <= kernels.calls["rule"] == kernels.calls[used] <= 2 * linear and kernels.calls[other] == 0


@pytest.mark.parametrize(
    "fla, triton, has_tilelang, refused",
    [
        ("0.6.0", "3.6.0", False, True),
        ("0.6.0", "3.6.0", True, False),
        ("0.4.0", "3.6.0", True, True),
        ("0.6.0", "3.7.1", False, False),
        ("0.6.0", "3.3.1", False, False),
        ("0.4.0", "3.4.0", False, True),
    ],
)
def test_versions_with_wrong_gradients_are_refused(fla, triton, has_tilelang, refused):
    versions = Version(fla), Version(triton)
    if not refused:
        check_versions(*versions, has_tilelang=has_tilelang)
        return
    with pytest.raises(ValueError, match=f"flash-linear-attention {fla} with triton {triton} computes wrong gradients"):
        check_versions(*versions, has_tilelang=has_tilelang)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """flash-linear-attention 0.6.0 and triton 3.6.0 on a machine with a GPU; importing the former fails."""
    for name, distribution, version in (("fla", "flash_linear_attention", "0.6.0"), ("triton", "triton", "3.6.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a CUDA context')")
        metadata = tmp_path / f"{distribution}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (metadata / "top_level.txt").write_text(f"{name}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(import_utils.PACKAGE_DISTRIBUTION_MAPPING, "fla", ["flash-linear-attention"])
    monkeypatch.setitem(sys.modules, "tilelang", None)
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    import_utils.is_flash_linear_attention_available.cache_clear()
    yield
    import_utils.is_flash_linear_attention_available.cache_clear()


def test_training_with_wrong_gradients_is_refused_on_hopper_gpus_only(installed, monkeypatch):
    config = family_config("Qwen3.5-27B")
    model, layers = oracle.plain_model(config), plan_model(config).structures
    check_kernels(plan_model(family_config("Qwen2.5-7B")).structures)
    with pytest.raises(ValueError, match="computes wrong gradients on Hopper GPUs"):
        oracle.make_engine(model, config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_kernels(layers)
    assert "fla" not in sys.modules


def test_a_model_can_be_planned_without_importing_the_kernels(installed, monkeypatch):
    """As a driver does, which is to hold no memory of the GPU."""
    name = MODELS["Qwen3.5-27B"].__name__
    parent, _, last = name.rpartition(".")
    monkeypatch.setattr(sys.modules[parent], last, sys.modules[name])  # put back at the end
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="a CUDA context"):
        importlib.import_module(name)
    with without_kernels():
        again = importlib.import_module(name)
    assert again.chunk_gated_delta_rule is None and "fla" not in sys.modules
    assert import_utils.is_flash_linear_attention_available()

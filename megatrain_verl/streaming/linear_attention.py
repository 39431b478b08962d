"""Gated delta-rule attention (Qwen3-Next, Qwen3.5) with the kernels of flash-linear-attention, over packed rows.

transformers takes these kernels where the package is installed. They are told where the rows lie, and so is the
convolution before them: that of the package causal-conv1d, or flash-linear-attention's own.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers.utils import import_utils

from megatrain_verl.streaming.attention import RowMask

HOPPER = 9  # major compute capability
# flash-linear-attention 0.6 names these versions of triton, and refuses them; older ones compute with them.
WRONG_TRITON = Version("3.4.0"), Version("3.7.1")
TILELANG_SINCE = Version("0.6.0")  # flash-linear-attention that computes these gradients by tilelang, if installed


def is_linear_attention(module: nn.Module) -> bool:
    """Whether a module is gated delta-rule attention."""
    return hasattr(module, "chunk_gated_delta_rule")


def takes_boundaries(module: nn.Module) -> bool:
    """Whether linear attention runs on flash-linear-attention, not on the stand-in of transformers."""
    return module.chunk_gated_delta_rule.__module__.startswith("fla.")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, transformers does not import flash-linear-attention, whose import takes memory of the GPU.

    For a process that plans a model and does not run it: models imported inside stay without these kernels.
    """
    available = import_utils.is_flash_linear_attention_available
    import_utils.is_flash_linear_attention_available = lambda: False
    try:
        yield
    finally:
        import_utils.is_flash_linear_attention_available = available


def check_kernels(layers: Iterable[nn.Module]) -> None:
    """Refuse kernels whose gradients are wrong on this GPU, before anything is trained with them.

    Looks at what is installed, as transformers does when a process that trains imports the model.

    Raises:
        ValueError: see `check_versions`.
    """
    used = any(is_linear_attention(module) for layer in layers for module in layer.modules())
    if used and torch.cuda.is_available() and import_utils.is_flash_linear_attention_available():
        if torch.cuda.get_device_capability()[0] == HOPPER:
            versions = _installed("fla"), _installed("triton")
            check_versions(*versions, has_tilelang=importlib.util.find_spec("tilelang") is not None)


def _installed(package: str) -> Version:
    """The version of `package`, which is not imported; its distribution may have another name."""
    names = importlib.metadata.packages_distributions()[package]
    return Version(importlib.metadata.version(package if package in names else names[0]))


def check_versions(fla: Version, triton: Version, *, has_tilelang: bool) -> None:
    """Refuse versions that compute wrong gradients on Hopper GPUs.

    Source: https://github.com/fla-org/flash-linear-attention/issues/640.

    Raises:
        ValueError: names the versions and what to install.
    """
    first, fixed = WRONG_TRITON
    if first <= triton < fixed and (fla < TILELANG_SINCE or not has_tilelang):
        raise ValueError(
            f"flash-linear-attention {fla} with triton {triton} computes wrong gradients on Hopper GPUs: install "
            f"triton {fixed} or newer, or flash-linear-attention {TILELANG_SINCE} and tilelang, or remove "
            "flash-linear-attention (rows are then unpacked, and transformers' own functions used)"
        )


def give_boundaries(module: nn.Module) -> None:
    """Let linear attention on flash-linear-attention run over packed rows; `module` is changed."""
    own = module.causal_conv1d_fn is None
    if own:
        module.causal_conv1d_fn = _convolution
    module.forward = partial(_with_boundaries, module.forward, own)


@torch.compiler.disable  # how the rows lie changes with every micro-batch: nothing here may become part of a graph
def _with_boundaries(
    forward: Callable[..., Tensor], own: bool, hidden_states: Tensor, attention_mask: RowMask, **named: object
) -> Tensor:
    boundaries = attention_mask.rows.cu_seqlens
    rows = boundaries if own else _row_of_token(boundaries, hidden_states.shape[1])
    named = {**named, "cu_seq_lens_q": boundaries, "seq_idx": rows}
    return forward(hidden_states=hidden_states, attention_mask=None, **named)


def _row_of_token(boundaries: Tensor, tokens: int) -> Tensor:
    """(1, T) int32, what causal-conv1d takes: the number of each token's row."""
    return torch.repeat_interleave(boundaries.diff(), output_size=tokens).to(torch.int32)[None]


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, seq_idx: Tensor) -> Tensor:
    """flash-linear-attention's causal convolution of `x` (1, D, T), called as that of causal-conv1d.

    `weight` (D, W), `bias` (D,); `seq_idx` (R + 1,) are the boundaries of the rows.
    """
    from fla.modules.convolution import causal_conv1d

    output, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=seq_idx)
    return output.transpose(1, 2)

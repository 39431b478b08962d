"""Kernels behind `attention.packed_attention`. Queries (1, heads, T, D), keys (1, kv_heads, T, D), values
(1, kv_heads, T, V).

`sdpa` and `eager` take one row, or a batch of equally long ones, and return (rows, heads, T, V). The others take all
rows of a micro-batch and return (1, T, heads, V).
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megatrain_verl.streaming.compiling import allow_variants

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from megatrain_verl.streaming.attention import RowMask

# Types of devices where flex attention is compiled; elsewhere torch runs it step by step, with T x T scores.
COMPILED_ON = ("cuda",)
# Left to itself torch takes its decoding kernel for less than 128 tokens. That one has no configuration where tokens
# times query heads per key head exceed 128.
KERNEL = {"BACKEND": "TRITON"}


@dataclass
class Features:
    """How scores become probabilities. `s_aux` (heads,) are attention sinks."""

    scaling: float
    dropout: float = 0.0
    softcap: float | None = None
    s_aux: Tensor | None = None

    def used(self) -> list[str]:
        """Names of those that not every kernel computes."""
        used = {"dropout": self.dropout > 0, "softcap": self.softcap is not None, "s_aux": self.s_aux is not None}
        return [name for name, is_used in used.items() if is_used]


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    features: Features,
    image_blocks: Tensor | None = None,
) -> Tensor:
    """torch's scaled dot product attention; a window or blocks of images as a mask."""
    mask, length = None, query.shape[2]
    if image_blocks is not None or (window is not None and window < length):
        mask = _mask(length, window, query.device, image_blocks)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=features.dropout,
        scale=features.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    features: Features,
    image_blocks: Tensor | None = None,
) -> Tensor:
    """Everything, step by step, with T x T scores per head in float32."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * features.scaling
    if features.softcap is not None:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    scores = scores.masked_fill(~_mask(query.shape[2], window, query.device, image_blocks), float("-inf"))
    if features.s_aux is not None:
        sinks = features.s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = scores.softmax(-1)[..., : key.shape[2]]
    return F.dropout(probabilities, features.dropout).to(value.dtype) @ value


def varlen(query: Tensor, key: Tensor, value: Tensor, mask: "RowMask", features: Features) -> Tensor:
    """torch's variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    # Newer torch asks to be told about grouped-query heads; torch 2.11 takes them as they are and has no such argument.
    gqa = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    window = {"window_size": (_left(mask), 0), "scale": features.scaling}
    return _over_boundaries(functools.partial(varlen_attn, **window, **gqa), query, key, value, mask)


def flash_attention_2(query: Tensor, key: Tensor, value: Tensor, mask: "RowMask", features: Features) -> Tensor:
    """The flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    settings = {
        "dropout_p": features.dropout,
        "softmax_scale": features.scaling,
        "causal": True,
        "window_size": (_left(mask), 0) if mask.window is not None else (-1, -1),
        "softcap": features.softcap or 0.0,
    }
    return _over_boundaries(functools.partial(flash_attn_varlen_func, **settings), query, key, value, mask)


def _over_boundaries(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: "RowMask"
) -> Tensor:
    boundaries = (mask.rows.cu_seqlens, mask.rows.cu_seqlens, mask.rows.longest, mask.rows.longest)
    width = value.shape[-1]
    if width < query.shape[-1]:  # these kernels have one head size for all three
        value = F.pad(value, (0, query.shape[-1] - width))
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(query, key, value, *boundaries)[..., :width].unsqueeze(0)


def flex_attention(query: Tensor, key: Tensor, value: Tensor, mask: "RowMask", features: Features) -> Tensor:
    """torch's compiled flex attention, with sinks by way of the log-sum-exp: softmax over keys and sink is the softmax
    over keys times sigmoid(lse - sink).
    """
    softcap = features.softcap

    def bend(score: Tensor, *position: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    settings = {
        "score_mod": None if softcap is None else bend,
        "block_mask": _block_mask(mask, query.shape[2], query.device),
        "scale": features.scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
        "kernel_options": KERNEL,
    }
    attend = _flex("flex_attention", query.device.type in COMPILED_ON)
    if features.s_aux is None:
        return attend(query, key, value, **settings).transpose(1, 2)
    output, auxiliary = attend(query, key, value, return_aux=flex.AuxRequest(lse=True), **settings)
    share = torch.sigmoid(auxiliary.lse - features.s_aux.float()[None, :, None])
    return (output * share[..., None]).to(value.dtype).transpose(1, 2)


@functools.cache
def _flex(name: str, compiled: bool) -> Callable[..., object]:
    """A function of torch's module; compiled, none of them holds T x T elements."""
    function = getattr(flex, name)
    if not compiled:
        return function
    allow_variants()  # beyond the limit the plain function would run, which holds all T x T scores
    return torch.compile(function)


def _block_mask(mask: "RowMask", tokens: int, device: torch.device) -> "BlockMask":
    if "block_mask" not in mask.cache:
        row = torch.repeat_interleave(torch.tensor(mask.rows.lengths)).to(device)
        window, blocks = mask.window, mask.image_blocks

        def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = query >= key
            if window is not None:
                seen = seen & (query - key < window)
            if blocks is not None:
                # Not in place: inductor lowers this function as a pointwise expression, without buffers to write to.
                seen = seen | ((blocks[query] == blocks[key]) & (blocks[query] >= 0))
            return seen & (row[query] == row[key])

        create = _flex("create_block_mask", device.type in COMPILED_ON)
        mask.cache["block_mask"] = create(allowed, None, None, tokens, tokens, device=str(device))
    return mask.cache["block_mask"]


def _mask(length: int, window: int | None, device: torch.device, image_blocks: Tensor | None = None) -> Tensor:
    """(length, length) bool: may query (row) see key (column)?"""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = (distance >= 0) & (distance < (length if window is None else window))
    if image_blocks is not None:
        seen |= (image_blocks[:, None] == image_blocks[None, :]) & (image_blocks[:, None] >= 0)
    return seen


def _left(mask: "RowMask") -> int:
    return -1 if mask.window is None else mask.window - 1

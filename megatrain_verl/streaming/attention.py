"""Causal attention over packed rows, registered with transformers as the attention implementation of every layer.

The engine never builds a T x T mask: in the place of the mask a `RowMask` travels through the layer and says where the
rows lie and how far back a token sees. A feature that the chosen kernel does not compute (sinks, soft-caps, dropout) is
refused by name instead of being dropped.
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from megatrain_verl.streaming import attention_kernels
from megatrain_verl.streaming.attention_kernels import Features

NAME = "megatrain"
# Kernels that compute more than scaled, causal, windowed attention.
COMPUTES = {
    "s_aux": ("eager", "flex_attention"),
    "softcap": ("eager", "flex_attention", "flash_attention_2"),
    "dropout": ("eager", "sdpa", "flash_attention_2"),
    "image_blocks": ("eager", "flex_attention", "sdpa"),
}
# Sizes of heads that the kernels of CUDA take: flash attention multiples of 8 up to 256, flex attention 16 and more, of
# which more than 256 would not fit into the shared memory of a Hopper GPU.
KERNEL_HEADS = range(16, 257, 8)


@dataclass
class RowLayout:
    """Where the rows of one packed micro-batch lie, and which kernel attends over them.

    `lengths` are tokens per row; `cu_seqlens` (R + 1,) int32 on the device of the activations, for kernels that
    take it; `implementation` is one of `ATTENTION_IMPLEMENTATIONS`.
    """

    lengths: list[int]
    cu_seqlens: Tensor
    implementation: str = "auto"

    def __post_init__(self) -> None:
        self.longest = max(self.lengths)
        # Number of rows if all are equally long, else 0: compiled code reads these two numbers, never the list.
        self.equal_rows = len(self.lengths) if len(set(self.lengths)) == 1 else 0

    @classmethod
    def of(cls, lengths: list[int], implementation: str, device: str | torch.device) -> "RowLayout":
        """Rows of `lengths` tokens."""
        boundaries = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
        return cls(lengths, boundaries, implementation)

    def chunks(self, size: int) -> "RowLayout":
        """The same tokens, with every row cut into rows of at most `size`."""
        lengths = [min(size, length - start) for length in self.lengths for start in range(0, length, size)]
        return RowLayout.of(lengths, self.implementation, self.cu_seqlens.device)


@dataclass(frozen=True)
class MaskKind:
    """Which earlier tokens of its row a token attends to: all, the last `window`, or those of its `chunk`."""

    window: int | None = None
    chunk: int | None = None

    def over(self, rows: RowLayout) -> "RowMask":
        """The mask of `rows`."""
        if self.chunk is not None and self.chunk < rows.longest:
            rows = rows.chunks(self.chunk)
        return RowMask(rows, self.window if self.window is not None and self.window < rows.longest else None)


@dataclass
class RowMask:
    """A token attends to earlier tokens of its row in `rows`, itself included, to at most `window` of them.

    Without `rows` the batch dimension separates the rows. `image_blocks` (T,) int: the tokens of a row with the same
    number from 0 on attend to all of each other, too.
    """

    rows: RowLayout | None
    window: int | None = None
    image_blocks: Tensor | None = None
    # What kernels that need a mask on the device keep between the layers of a micro-batch.
    cache: dict[str, object] = field(default_factory=dict)


def register() -> None:
    """Make `packed_attention` known to transformers under `NAME`."""
    AttentionInterface.register(NAME, packed_attention)


def of_parts(config: PretrainedConfig) -> dict[str, str]:
    """The attention implementation of each part of a model: this one for the language model, torch's for an encoder."""
    parts = {name: NAME for name in ("", "text_config")}
    return parts | {name: "sdpa" for name in getattr(config, "sub_configs", {}) if name != "text_config"}


def check_available(implementation: str, dtype: str, device: str) -> None:
    """Refuse an attention implementation that this machine or compute dtype cannot run.

    Raises:
        ValueError: names the implementation and what to choose instead.
    """
    if implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError("attn_implementation=flash_attention_2 needs the flash-attn package; install it or use auto")
    if implementation in ("varlen", "flash_attention_2") and (dtype != "bfloat16" or device != "cuda"):
        raise ValueError(
            f"attn_implementation={implementation} runs in bfloat16 on CUDA only (here {dtype} on {device}); use auto"
        )


def check_layers(implementation: str, layers: Iterable[nn.Module]) -> None:
    """Refuse an attention implementation that would leave out what `layers` compute.

    Raises:
        ValueError: names the implementation, the layer and the feature.
    """
    for module in (module for layer in layers for module in layer.modules()):
        features = {
            "s_aux": getattr(module, "sinks", None),
            "softcap": getattr(module, "attn_logit_softcapping", None),
        }
        for name, value in features.items():
            if value is not None:
                _check_computes(implementation, name, module)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMask,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of `attention_mask`.

    `query` (1, heads, T, D), `key` (1, kv_heads, T, D), `value` (1, kv_heads, T, V). Returns (1, T, heads, V); or with
    (R, ..., longest row, ...) where the batch dimension separates the rows. Scores
    above `softcap` are bent, softcap * tanh(score / softcap); `s_aux` (heads,) are scores of a token without a value.

    Raises:
        ValueError: the implementation asked for does not compute what the layer asks for.
    """
    rows = attention_mask.rows
    features = Features(query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, softcap, s_aux)
    if rows is None:
        attend = attention_kernels.sdpa if softcap is None and s_aux is None else attention_kernels.eager
        return attend(query, key, value, attention_mask.window, features).transpose(1, 2), None
    plain = attention_mask.window is None and attention_mask.image_blocks is None and softcap is None and s_aux is None
    if rows.equal_rows and plain:
        if rows.implementation in ("auto", "sdpa"):
            # The only path that is compiled together with its layer: a compiled layer runs 3 to 15% faster for it.
            return _equal_rows(query, key, value, rows.equal_rows, features), None
    return _uncompiled_rows(module, query, key, value, attention_mask, features), None


def _equal_rows(query: Tensor, key: Tensor, value: Tensor, count: int, features: Features) -> Tensor:
    batch = (tensor[0].unflatten(1, (count, -1)).transpose(0, 1) for tensor in (query, key, value))
    return attention_kernels.sdpa(*batch, None, features).transpose(1, 2).flatten(0, 1).unsqueeze(0)


@torch.compiler.disable  # how the rows lie changes with every micro-batch: nothing here may become part of a graph
def _uncompiled_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: RowMask, features: Features
) -> Tensor:
    kernel = _choose_kernel(query, mask, features)
    for name in [*features.used(), *(["image_blocks"] if mask.image_blocks is not None else [])]:
        _check_computes(kernel, name, module)
    if kernel in ("sdpa", "eager"):
        attend = attention_kernels.sdpa if kernel == "sdpa" else attention_kernels.eager
        lengths = mask.rows.lengths
        blocks = [None] * len(lengths) if mask.image_blocks is None else mask.image_blocks.split(lengths)
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), blocks, strict=True)
        attended = [attend(*part, mask.window, features, block).transpose(1, 2) for *part, block in parts]
        return torch.cat(attended, dim=1)
    return getattr(attention_kernels, kernel)(query, key, value, mask, features)


def _choose_kernel(query: Tensor, mask: RowMask, features: Features) -> str:
    if mask.rows.implementation != "auto":
        return mask.rows.implementation
    plain = features.s_aux is None and features.softcap is None
    suits = query.device.type != "cpu" and query.dtype == torch.bfloat16 and query.shape[-1] in KERNEL_HEADS
    if features.dropout > 0 or not suits:
        return "sdpa" if plain else "eager"
    if not plain or mask.image_blocks is not None:
        return "flex_attention"
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") else "varlen"


def _check_computes(implementation: str, feature: str, module: nn.Module) -> None:
    if implementation != "auto" and feature in COMPUTES and implementation not in COMPUTES[feature]:
        raise ValueError(
            f"{type(module).__name__} uses {feature}, which attn_implementation={implementation} does not compute; "
            "use attn_implementation=auto"
        )

"""Checkpoints with quantised weights, read as the unquantised tensors that they stand for, a part at a time.

MXFP4 (GPT-OSS): `X_blocks` holds two E2M1 numbers per byte in blocks of 32, `X_scales` a power of two for each block.
FP8 with block scales (DeepSeek-V3, Qwen3-FP8): `X` is float8_e4m3fn, `X_scale_inv` a factor for each block of
`weight_block_size` rows and columns; the last block of a side may be cut off.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatrain_verl.streaming.weight_folder import Header, WeightFolder, read_config

MXFP4, FP8 = "mxfp4", "fp8"
BLOCKS, SCALES, SCALE_INV = "_blocks", "_scales", "_scale_inv"
MXFP4_BLOCK = 32  # numbers that share a scale


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of the unquantised model. `parts` yields (first element, float tensor), consecutive parts of it."""

    header: Header
    parts: Callable[[], Iterator[tuple[int, Tensor]]]


def check_quantization(quantization: object) -> None:
    """Refuse, by name, a checkpoint whose quantised weights cannot be read. None is an unquantised checkpoint.

    Raises:
        ValueError: another method than MXFP4 or FP8 with block scales.
    """
    method = _method(quantization)
    if method is None or method == MXFP4 or (method == FP8 and _block_size(quantization) is not None):
        return
    what = "fp8 without weight_block_size" if method == FP8 else method
    raise ValueError(
        f"the checkpoint is quantised ({what}); training reads bfloat16, float16 and float32 weights, mxfp4, and fp8 "
        "with block scales: dequantise it first"
    )


def without_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config` for weights that are not quantised."""
    config = copy.deepcopy(config)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def stored_weights(folder: WeightFolder) -> list[StoredWeight]:
    """The weights of `folder`, those quantised by the method that its config names as what they stand for.

    Raises:
        ValueError: see `check_quantization`.
    """
    quantization = read_config(folder.path).get("quantization_config")
    check_quantization(quantization)
    headers = {header.name: header for header in folder.headers}
    weights: dict[str, StoredWeight] = {}
    if _method(quantization) == MXFP4:
        weights = _read_mxfp4(folder, headers)
        sources = {name + suffix for name in weights for suffix in (BLOCKS, SCALES)}
    elif _method(quantization) == FP8:
        weights = _read_fp8(folder, headers, *_block_size(quantization))
        sources = {name + suffix for name in weights for suffix in ("", SCALE_INV)}
    else:
        sources = set()
    plain = [header for name, header in headers.items() if name not in sources]
    return [*weights.values(), *(StoredWeight(header, partial(_whole, folder, header.name)) for header in plain)]


def _read_mxfp4(folder: WeightFolder, headers: Mapping[str, Header]) -> dict[str, StoredWeight]:
    weights = {}
    for header in headers.values():
        name = header.name.removesuffix(BLOCKS)
        scales = headers.get(name + SCALES)
        if name != header.name and scales is not None and len(header.shape) == 4 and header.shape[:-1] == scales.shape:
            experts, rows, blocks, _ = header.shape
            shape = torch.Size((experts, blocks * MXFP4_BLOCK, rows))  # transformers exchanges rows and columns
            weights[name] = StoredWeight(Header(name, shape, "BF16"), partial(_dequantise_mxfp4, folder, name))
    return weights


def _dequantise_mxfp4(folder: WeightFolder, name: str) -> Iterator[tuple[int, Tensor]]:
    start = 0
    for blocks, scales in zip(folder.tensor(name + BLOCKS), folder.tensor(name + SCALES), strict=True):
        expert = convert_moe_packed_tensors(blocks[None], scales[None])[0]
        yield start, expert
        start += expert.numel()


def _read_fp8(folder: WeightFolder, headers: Mapping[str, Header], rows: int, columns: int) -> dict[str, StoredWeight]:
    weights = {}
    for name, header in headers.items():
        factors = headers.get(name + SCALE_INV)
        if factors is None or header.dtype != "F8_E4M3" or factors.shape != _grid(header.shape, rows, columns):
            continue

        def parts(name: str = name) -> Iterator[tuple[int, Tensor]]:
            return dequantise_fp8(folder.tensor(name), folder.tensor(name + SCALE_INV), rows, columns)

        weights[name] = StoredWeight(Header(name, header.shape, "F32"), parts)
    return weights


def _grid(shape: torch.Size, rows: int, columns: int) -> tuple[int, ...]:
    *stack, height, width = shape
    return (*stack, math.ceil(height / rows), math.ceil(width / columns))


def dequantise_fp8(quantised: Tensor, factors: Tensor, rows: int, columns: int) -> Iterator[tuple[int, Tensor]]:
    """(first element, float32 rows) of `quantised` (..., h, w; float8_e4m3fn), a row of blocks at a time.

    `factors` (..., ceil(h / rows), ceil(w / columns)) multiply the blocks.
    """
    height, width = quantised.shape[-2:]
    start = 0
    for matrix, grid in zip(quantised.view(-1, height, width), factors.view(-1, *factors.shape[-2:]), strict=True):
        for part, factor in zip(matrix.split(rows), grid, strict=True):
            yield start, part.to(torch.float32) * factor.to(torch.float32).repeat_interleave(columns)[:width]
            start += part.numel()


def _whole(folder: WeightFolder, name: str) -> Iterator[tuple[int, Tensor]]:
    yield 0, folder.tensor(name)


def _method(quantization: object) -> str | None:
    if quantization is None:
        return None
    method = _field(quantization, "quant_method")
    return str(getattr(method, "value", method))


def _block_size(quantization: object) -> tuple[int, int] | None:
    size = _field(quantization, "weight_block_size")
    return None if size is None else tuple(size)


def _field(quantization: object, name: str) -> object:
    return quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, None)

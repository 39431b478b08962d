"""A micro-batch on the device, with what every layer call and the token head need of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_verl.streaming.attention import MaskKind, RowLayout
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.layer_arguments import DecoderSkeleton
from megatrain_verl.streaming.token_head import ScoredTokens


@dataclass
class DeviceBatch:
    """`input_ids` (T,) int64; `layer_arguments`: keyword arguments by layer; `tokens`: what is scored."""

    input_ids: Tensor
    layer_arguments: list[dict[str, object]]
    tokens: ScoredTokens


@torch.no_grad()
def to_device(
    batch: MicroBatch,
    device: str,
    skeleton: DecoderSkeleton,
    mask_kinds: list[MaskKind],
    dtype: torch.dtype,
    attn_implementation: str,
) -> DeviceBatch:
    """`batch` on `device`, what its layers need computed from the given positions, in `dtype`."""
    positions = batch.scored_positions()
    labels, temperature = batch.input_ids.cpu()[positions + 1], batch.token_temperature()[positions]
    tokens = ScoredTokens(positions.to(device), labels.to(device), temperature.to(device))
    rows = RowLayout.of(batch.row_lengths, attn_implementation, device)
    masks = {kind: kind.over(rows) for kind in set(mask_kinds)}
    arguments = skeleton.arguments(batch.position_ids.to(device).unsqueeze(-2), batch.row_lengths, dtype)
    arguments = [{**named, "attention_mask": masks[kind]} for named, kind in zip(arguments, mask_kinds, strict=True)]
    return DeviceBatch(batch.input_ids.to(device), arguments, tokens)

"""A micro-batch on the device, with what every layer call and the token head need of it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatrain_verl.streaming.attention import RowLayout
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.token_head import ScoredTokens


@dataclass
class DeviceBatch:
    """`input_ids` (T,) int64; `layer_arguments`: keyword arguments of every layer call; `tokens`: what is scored."""

    input_ids: Tensor
    layer_arguments: dict[str, object]
    tokens: ScoredTokens


@torch.no_grad()
def to_device(
    batch: MicroBatch, rotary: nn.Module, dtype: torch.dtype, device: str, attn_implementation: str
) -> DeviceBatch:
    """`batch` on `device`, its rotary embeddings computed from the given positions, in `dtype`."""
    positions = batch.scored_positions()
    labels, temperature = batch.input_ids.cpu()[positions + 1], batch.token_temperature()[positions]
    tokens = ScoredTokens(positions.to(device), labels.to(device), temperature.to(device))
    boundaries = F.pad(torch.tensor(batch.row_lengths).cumsum(0), (1, 0)).to(device, torch.int32)
    position_ids = batch.position_ids.to(device)[None]
    arguments = {
        "attention_mask": None,
        "position_ids": position_ids,
        "position_embeddings": rotary(torch.empty(0, dtype=dtype, device=device), position_ids),
        "rows": RowLayout(batch.row_lengths, boundaries, attn_implementation),
    }
    return DeviceBatch(batch.input_ids.to(device), arguments, tokens)

"""A micro-batch on the device, with what every layer call and the token head need of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain_verl.streaming.attention import MaskKind, RowLayout
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.image_positions import image_blocks, rope_positions
from megatrain_verl.streaming.layer_arguments import DecoderSkeleton
from megatrain_verl.streaming.token_head import ScoredTokens
from megatrain_verl.streaming.vision_plan import VisionPlan


@dataclass
class DeviceBatch:
    """`input_ids` (T,) int64; `layer_arguments`: keyword arguments by layer; `tokens`: what is scored.

    `images`: see `MicroBatch`; `image_positions` (N,) int64: where their features go.
    """

    input_ids: Tensor
    layer_arguments: list[dict[str, object]]
    tokens: ScoredTokens
    images: dict[str, Tensor] | None = None
    image_positions: Tensor | None = None


@torch.no_grad()
def to_device(
    batch: MicroBatch,
    device: str,
    skeleton: DecoderSkeleton,
    mask_kinds: list[MaskKind],
    vision: VisionPlan | None,
    dtype: torch.dtype,
    attn_implementation: str,
) -> DeviceBatch:
    """`batch` on `device`, what its layers need computed from the given positions, in `dtype`."""
    positions = batch.scored_positions()
    labels, temperature = batch.input_ids.cpu()[positions + 1], batch.token_temperature()[positions]
    tokens = ScoredTokens(positions.to(device), labels.to(device), temperature.to(device))
    rows = RowLayout.of(batch.row_lengths, attn_implementation, device)
    masks = {kind: kind.over(rows) for kind in set(mask_kinds)}
    if batch.images is not None and vision.bidirectional:
        for mask in masks.values():
            mask.image_blocks = image_blocks(batch, vision).to(device)
    position_ids = batch.position_ids if vision is None else rope_positions(batch, vision)
    arguments = skeleton.arguments(position_ids.to(device).unsqueeze(-2), batch.row_lengths, dtype)
    arguments = [{**named, "attention_mask": masks[kind]} for named, kind in zip(arguments, mask_kinds, strict=True)]
    whole = DeviceBatch(batch.input_ids.to(device), arguments, tokens)
    if batch.images is not None:
        whole.images = {name: value.to(device) for name, value in batch.images.items()}
        whole.image_positions = (batch.input_ids.cpu() == vision.image_token_id).nonzero().squeeze(1).to(device)
    return whole

"""Where the images of a micro-batch lie: image tokens, and positions in time, height and width (M-RoPE)."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.vision_plan import VisionPlan

IMAGE = 1  # in mm_token_type_ids, as transformers counts: 0 text, 1 image


def rope_positions(batch: MicroBatch, vision: VisionPlan) -> Tensor:
    """(4, T) int64 of a model with M-RoPE: text positions, and those in time, height and width; (T,) of another one.

    Given positions in four rows are taken as they are. Else they come from the model's own `get_rope_index`, row by
    row of the batch; without images all four are the text positions.
    """
    if batch.position_ids.dim() == 2 or not hasattr(vision.module, "get_rope_index"):
        return batch.position_ids
    if batch.images is None:
        return batch.position_ids.expand(4, -1)
    rows = batch.input_ids.cpu().split(batch.row_lengths)
    ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    grids = {name: value.cpu() for name, value in batch.images.items() if name == "image_grid_thw"}
    types = (ids == vision.image_token_id).int() * IMAGE
    positions, _ = vision.module.get_rope_index(input_ids=ids, mm_token_type_ids=types, attention_mask=mask, **grids)
    return torch.cat([batch.position_ids.cpu()[None], positions[:, mask.bool()]])


def image_blocks(batch: MicroBatch, vision: VisionPlan) -> Tensor:
    """(T,) int64: the tokens of one image have one number from 0 on, text has -1; as Gemma 3's `token_type_ids` say."""
    is_image = batch.input_ids.cpu() == vision.image_token_id
    begins = is_image.clone()
    begins[1:] &= ~is_image[:-1]
    begins[torch.tensor(batch.row_lengths).cumsum(0)[:-1]] = True  # an image ends with its row
    return torch.where(is_image, begins.long().cumsum(0), -1)


def check_images(micro_batches: list[MicroBatch], vision: VisionPlan | None) -> None:
    """Refuse images that the model cannot take.

    Raises:
        ValueError: images for a text model, or inputs that `get_image_features` of this family does not take or lacks.
    """
    for batch in micro_batches:
        if batch.images is None:
            continue
        if vision is None:
            raise ValueError("the micro-batch has images, but the model takes text only")
        if unknown := [name for name in batch.images if name not in vision.arguments]:
            raise ValueError(f"{type(vision.module).__name__} does not take {', '.join(unknown)} of an image")
        if "pixel_values" not in batch.images:
            raise ValueError("images must have pixel_values")

"""Images of several rows as one: the tensors that `get_image_features` takes."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Of what processors return: the rest is text, or follows from these.
IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "image_sizes")


def join_images(rows: list[dict[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """The images of `rows` behind each other along the first dimension; None if no row has any.

    Pixels of images in crops (images, crops, channels, height, width) are padded to the largest number of crops, as the
    processors do within a batch; models know from the image's size how many are real.
    """
    present = [images for images in rows if images]
    if not present:
        return None
    return {name: _join([images[name] for images in present]) for name in present[0]}


def _join(tensors: list[Tensor]) -> Tensor:
    if tensors[0].dim() == 5:
        crops = max(tensor.shape[1] for tensor in tensors)
        tensors = [F.pad(tensor, (0, 0) * 3 + (0, crops - tensor.shape[1])) for tensor in tensors]
    return torch.cat(tensors)

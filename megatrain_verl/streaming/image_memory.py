"""Device memory that the images of a pass take, from the sizes of its pixels and of the encoder."""

from dataclasses import dataclass

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.vision_plan import VisionPlan


@dataclass(frozen=True)
class ImageSizes:
    """Elements per patch and image token; a patch is what the encoder's first convolution makes one vector of.

    `patch`: pixels of a patch; `kept`: inputs of all encoder blocks; `block`: what the linear layers of the largest
    block take and return; `features`: of an image token, with those of deepstack; `trained`: parameters of encoder and
    projector that are.
    """

    image_token_id: int
    patch: int
    kept: int
    block: int
    features: int
    trained: int

    @classmethod
    def of(cls, vision: VisionPlan) -> "ImageSizes":
        """The sizes of the vision part of a model."""
        encoder, config = vision.encoder_of(vision.module), vision.module.config
        convolution = next(each for each in encoder.modules() if isinstance(each, nn.Conv2d | nn.Conv3d))
        blocks = [each for each in encoder.modules() if isinstance(each, GradientCheckpointingLayer)]
        deepstack = getattr(config.vision_config, "deepstack_visual_indexes", None) or []
        return cls(
            image_token_id=vision.image_token_id,
            patch=convolution.weight[0].numel(),
            kept=len(blocks) * convolution.out_channels,
            block=max(_linear_elements(block) for block in blocks),
            features=(1 + len(deepstack)) * config.get_text_config().hidden_size,
            trained=sum(unit.trained for unit in vision.units),
        )

    def held_bytes(self, batch: MicroBatch, itemsize: int) -> int:
        """Bytes that the images of `batch` take from the start of its wave to the end: pixels as they are given,
        features, and the gradients of these if something is trained by them.
        """
        if batch.images is None:
            return 0
        features = int((batch.input_ids == self.image_token_id).sum()) * self.features * itemsize
        return sum(value.nbytes for value in batch.images.values()) + (2 if self.trained else 1) * features

    def encoder_bytes(self, batch: MicroBatch, itemsize: int) -> int:
        """Bytes that the vision part needs for the images of `batch` beside weights and accumulators: inputs of the
        encoder's blocks, one block's graph with the gradients of what is in it, and the gradients that autograd
        returns. With nothing trained, one block's forward pass.
        """
        if batch.images is None:
            return 0
        patches = batch.images["pixel_values"].numel() // self.patch
        per_patch = self.kept + 2 * self.block if self.trained else self.block
        return itemsize * (patches * per_patch + self.trained)


@dataclass(frozen=True)
class ImageBytes:
    """Of the micro-batches of a pass: `held` by each of them, `encoder`: the most that the encoder needs."""

    held: list[int]
    encoder: int = 0

    @classmethod
    def of(cls, micro_batches: list[MicroBatch], sizes: ImageSizes | None, itemsize: int) -> "ImageBytes":
        """Sizes of what has elements of `itemsize` bytes on the device; `sizes` is None for a text model."""
        if sizes is None:
            return cls([0] * len(micro_batches))
        held = [sizes.held_bytes(batch, itemsize) for batch in micro_batches]
        return cls(held, max(sizes.encoder_bytes(batch, itemsize) for batch in micro_batches))


def _linear_elements(block: nn.Module) -> int:
    linears = [each for each in block.modules() if isinstance(each, nn.Linear)]
    return sum(each.in_features + each.out_features for each in linears)

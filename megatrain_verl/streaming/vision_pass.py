"""The vision part of one pass: image features before the embedding, and their gradients after it.

    forward    encoder and projector run over the images of every micro-batch; their features replace the embeddings of
               the image tokens, and with deepstack are added to the outputs of the first decoder layers as well
    backward   what reaches those places is the features' gradient; encoder and projector are computed again from the
               images, now with a graph (whose blocks transformers checkpoints), and run backward

What is named `do_...` is work on the compute stream.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain_verl.streaming.device_batch import DeviceBatch
from megatrain_verl.streaming.device_ring import DeviceRing
from megatrain_verl.streaming.dropout import dropout_seed, seeded
from megatrain_verl.streaming.gradients import Accumulator, GradientPath, gradient_views
from megatrain_verl.streaming.host_store import ParameterState, UnitState
from megatrain_verl.streaming.streams import Streams
from megatrain_verl.streaming.vision_plan import VisionPlan, image_features

VISION = -1  # in the place of a layer's number in the seed of dropout masks


class VisionPass:
    """What one `LayerMajorPass` does with images.

    Args:
        plan, state: the vision part and all host arenas.
        streams, ring: the queues and the device's buffers.
        load: starts the transfer of a unit's weights.
        batches: of the pass; filled before `forward`.
        with_images: which micro-batches have images.
        first, dropout_key, device: as in `LayerMajorPass`.
    """

    def __init__(
        self,
        plan: VisionPlan,
        state: ParameterState,
        streams: Streams,
        ring: DeviceRing,
        load: Callable[[UnitState], None],
        batches: list[DeviceBatch],
        with_images: list[int],
        first: int,
        dropout_key: tuple[int, int, int] | None,
        device: str,
    ) -> None:
        self._plan, self._streams, self._ring, self._load = plan, streams, ring, load
        self._batches, self._with_images = batches, with_images
        self._first, self._dropout_key, self._device = first, dropout_key, device
        by_name = {unit.plan.name: unit for unit in state.units}
        self._units = [by_name[unit.name] for unit in plan.units]
        self._trained = any(unit.grad is not None for unit in self._units)
        self._features: dict[int, list[Tensor]] = {}  # micro-batch -> what `image_features` returned, without graph
        self._grads: dict[tuple[int, int], Tensor] = {}  # micro-batch, number of the features -> their gradient

    # ------------------------------------------------------------------------------------------------ the order

    def forward(self) -> None:
        """Append the features of all micro-batches; nothing where there are no images."""
        self._over_images(self._do_features)

    def backward(self, gradients: GradientPath) -> None:
        """Append the backward pass of what is trained, after that of the embedding.

        Without images its gradient is zero.
        """
        accumulators = [gradients.begin(unit) for unit in self._units]
        if self._trained:
            self._over_images(partial(self._do_backward, accumulators=accumulators))
        for unit, accumulator in zip(self._units, accumulators, strict=True):
            gradients.finish(unit, accumulator)

    def _over_images(self, work: Callable[[int], None]) -> None:
        if not self._with_images:
            return
        for unit in self._units:
            self._load(unit)
            self._ring.use(unit.plan)
        for m in self._with_images:
            self._streams.compute.run(partial(work, m))
        for unit in self._units:
            self._ring.done(unit.plan)

    # ------------------------------------------------------------------------------- work on the compute stream

    @torch.no_grad()
    def _do_features(self, m: int) -> None:
        self._features[m] = self._compute(m)
        count, places = len(self._features[m][0]), len(self._batches[m].image_positions)
        if count != places:
            raise ValueError(
                f"micro-batch {self._first + m} has {places} image tokens (id {self._plan.image_token_id}), but its "
                f"images make {count} features; process text and images of a row together, and do not cut it"
            )

    def do_insert(self, m: int, embeddings: Tensor) -> Tensor:
        """`embeddings` (T, H) of a micro-batch with features in the place of its image tokens."""
        if m not in self._features:
            return embeddings
        return embeddings.index_copy(0, self._batches[m].image_positions, self._features[m][0].to(embeddings.dtype))

    def do_add(self, m: int, layer: int, output: Tensor) -> Tensor:
        """The `output` (1, T, H) of a decoder layer with the features that are added to it."""
        if m not in self._features or layer + 1 >= len(self._features[m]):
            return output
        return output.index_add(
            1, self._batches[m].image_positions, self._features[m][layer + 1][None].to(output.dtype)
        )

    def do_take_output_gradient(self, m: int, layer: int, grad: Tensor) -> None:
        """Keep the gradient of what `do_add` added, given that of the layer's output (1, T, H)."""
        if self._trained and m in self._features and layer + 1 < len(self._features[m]):
            self._grads[m, layer + 1] = grad[0, self._batches[m].image_positions]

    def do_take_embedding_gradient(self, m: int, grad: Tensor) -> Tensor:
        """Keep the features' part of the gradient (T, H) of the first layer's input; returns the embedding's part."""
        if m not in self._features:
            return grad
        positions = self._batches[m].image_positions
        if self._trained:
            self._grads[m, 0] = grad[positions]
        return grad.index_fill(0, positions, 0.0)

    def _do_backward(self, m: int, accumulators: list[Accumulator | None]) -> None:
        with torch.enable_grad():
            features = self._compute(m)
        totals: dict[str, Tensor] = {}
        for unit, accumulator in zip(self._units, accumulators, strict=True):
            totals |= gradient_views(unit.plan, accumulator)
        parameters = [self._module.get_parameter(local) for local in totals]
        grads = [self._grads.pop((m, number)).to(part.dtype) for number, part in enumerate(features)]
        # With deepstack the features of a frozen branch have no graph.
        pairs = [(part, grad) for part, grad in zip(features, grads, strict=True) if part.requires_grad]
        outputs, output_grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, parameters, output_grads, allow_unused=True)
        for total, grad in zip(totals.values(), found, strict=True):
            if grad is not None:
                total.add_(grad)
        del self._features[m]

    def _compute(self, m: int) -> list[Tensor]:
        seed = None if self._dropout_key is None else dropout_seed(self._dropout_key, self._first + m, VISION)
        with seeded(seed, self._device):
            return image_features(self._module, self._batches[m].images)

    @property
    def _module(self) -> PreTrainedModel:
        return self._ring.vision

"""The inputs of units that are kept between the forward and the backward pass, one per micro-batch (checkpoints)."""

from torch import Tensor


class ActivationStore:
    """Layer inputs on the device, by layer and micro-batch. Each is put once and taken once."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def put(self, layer: int, micro_batch: int, hidden: Tensor) -> None:
        """Keep `hidden` (1, T, H), the input of `layer`."""
        self._inputs[layer, micro_batch] = hidden

    def take(self, layer: int, micro_batch: int) -> Tensor:
        """Hand out the input of `layer` (1, T, H) and forget it."""
        return self._inputs.pop((layer, micro_batch))

    def peek(self, layer: int, micro_batch: int) -> Tensor:
        """The input of `layer` (1, T, H), still kept."""
        return self._inputs[layer, micro_batch]

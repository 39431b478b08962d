"""How a decoder layer is run: as transformers wrote it, or compiled once per structure group.

Every layer of a group, in both slots, runs the same compiled code: the weights are inputs of the graph. Attention stays
outside of it, since how the rows lie changes with every micro-batch.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class LayerCall:
    """Calls a layer template; compiled if asked for, and as it is if that fails (with one warning)."""

    def __init__(self, compiled: bool) -> None:
        # No dynamic=True: the number of tokens becomes symbolic when it changes for the first time.
        self._compiled = torch.compile(_call) if compiled else None

    def __call__(self, template: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        """The layer's output (1, T, H) for its input (1, T, H)."""
        if self._compiled is None:
            return _call(template, hidden, arguments)
        try:
            return self._compiled(template, hidden, arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            logger.warning("the decoder layer cannot be compiled and runs as it is: %s", error)
            self._compiled = None
            return _call(template, hidden, arguments)


def _call(template: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    return template(hidden, **arguments)

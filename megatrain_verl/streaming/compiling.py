"""torch.compile with the plain function behind it."""

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)
# With and without gradient, training and scoring, equal and packed rows, fixed and symbolic sizes: a layer has up to 16
# variants. At torch's own limit of 8 the rest would run uncompiled without a word.
VARIANTS = 32


def allow_variants() -> None:
    """Let a function be compiled in `VARIANTS` variants."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)


class MaybeCompiled:
    """Calls `function`, compiled if asked for, and as it is if that fails (with one warning).

    A decoder layer is compiled once per structure group: every layer, in every slot, runs the same code, since the
    weights are inputs of the graph. No `dynamic=True`: sizes become symbolic when they change for the first time.
    """

    def __init__(self, function: Callable[..., Any], compiled: bool) -> None:
        self._function = function
        self._compiled = torch.compile(function) if compiled else None
        if compiled:
            allow_variants()

    def __call__(self, *arguments: object) -> Any:
        if self._compiled is None:
            return self._function(*arguments)
        try:
            return self._compiled(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            logger.warning("%s cannot be compiled and runs as it is: %s", self._function.__name__, error)
            self._compiled = None
            return self._function(*arguments)

"""torch.compile with the plain function behind it."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

logger = logging.getLogger(__name__)
# With and without gradient, training and scoring, equal and packed rows, fixed and symbolic sizes: a layer has up to 16
# variants. At torch's own limit of 8 the rest would run uncompiled without a word.
VARIANTS = 32
UNCOMPILED_EXPERTS = "uncompiled_grouped_mm"


def allow_variants() -> None:
    """Let a function be compiled in `VARIANTS` variants."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)


def leave_out_experts(layers: Sequence[nn.Module]) -> None:
    """Make the experts of `layers` (transformers' modules) run as they are inside of a compiled layer.

    For float32: there transformers compiles grouped products as an operator of its own, which reads the sizes of the
    groups in its backward. torch cannot trace that, and takes minutes for each part of a layer to find it out.
    """
    ALL_EXPERTS_FUNCTIONS.register(UNCOMPILED_EXPERTS, torch.compiler.disable(grouped_mm_experts_forward))
    for module in (module for layer in layers for module in layer.modules()):
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            config._experts_implementation = UNCOMPILED_EXPERTS


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

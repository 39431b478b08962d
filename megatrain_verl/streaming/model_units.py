"""The units of a model: what crosses to the device as one transfer, and where its parameters lie in flat arenas."""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from megatrain_verl.streaming.attention import MaskKind

ALIGNMENT = 128  # elements; keeps every parameter of a slot on a 256-byte boundary in bfloat16


@dataclass(frozen=True)
class ParameterSpan:
    """Where a parameter lies in its unit's flat arenas. `name` is its Hugging Face name, `local` that in its module."""

    name: str
    local: str
    shape: torch.Size
    offset: int
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferPlan:
    """A tensor of a layer that is loaded and exported, but not trained, in the family's own type (router biases)."""

    name: str
    local: str
    shape: torch.Size
    dtype: torch.dtype


class Range(NamedTuple):
    """`numel` elements that lie at `arena` in a unit's arenas and at `device` in what is on the device of it."""

    arena: int
    device: int
    numel: int


@dataclass
class UnitPlan:
    """A part of the model that crosses to the device as one transfer. `numel` counts alignment padding too.

    Trainable parameters come first in `spans`. A layer whose experts are streamed apart crosses in several `parts`.
    """

    name: str
    spans: list[ParameterSpan]
    numel: int
    # For decoder layers: index into ModelPlan.structures, and which tokens they attend to.
    structure: int | None = None
    mask: MaskKind = MaskKind()
    buffers: list[BufferPlan] = field(default_factory=list)
    # Of the others: the device slot and gradient accumulator that they take turns in.
    slot: str = "edge"
    # Of a decoder layer with experts: all but them first, then some of them each; see `expert_parts.py`.
    parts: "list[UnitPlan]" = field(default_factory=list)

    @property
    def pieces(self) -> "list[UnitPlan]":
        """What crosses as one transfer each: the parts, or the unit as a whole."""
        return self.parts or [self]

    def ranges(self) -> list[Range]:
        """Where that which is on the device lies in the arenas."""
        return [Range(0, 0, self.numel)]

    def trained_ranges(self) -> list[Range]:
        """The same of what is trained."""
        ranges = [each for each in self.ranges() if each.device < self.trained]
        return [each._replace(numel=min(each.numel, self.trained - each.device)) for each in ranges]

    def module_of(self, layer: nn.Module) -> nn.Module:
        """What computes with these weights in a decoder layer, which may be changed for it."""
        return layer

    @property
    def trained(self) -> int:
        """Leading elements that are trained; the others have no gradient, no AdamW state and no low half."""
        return next((span.offset for span in self.spans if not span.trainable), self.numel)


def plan_unit(unit: str, parameters: Iterable[tuple[str, nn.Parameter]], names: dict[int, str]) -> UnitPlan:
    """A unit of `parameters`, given with their names in the module that uses them; `names` has their full ones by id.

    Those that require no gradient are frozen.
    """
    spans, offset = [], 0
    for path, parameter in sorted(parameters, key=lambda item: not item[1].requires_grad):
        span = ParameterSpan(names[id(parameter)], path, parameter.shape, offset, parameter.requires_grad)
        spans.append(span)
        offset += -(-span.numel // ALIGNMENT) * ALIGNMENT
    return UnitPlan(unit, spans, offset)


def plan_buffers(layer: nn.Module, names: dict[int, str]) -> list[BufferPlan]:
    """The buffers of `layer`; `names` has their full names by id.

    Raises:
        ValueError: one that checkpoints do not hold.
    """
    buffers = []
    for path, module in layer.named_modules():
        for local, buffer in module.named_buffers(recurse=False):
            if local in module._non_persistent_buffers_set:
                raise ValueError(f"{type(module).__name__} makes the buffer {local} itself; this is not supported")
            path_of_buffer = f"{path}.{local}" if path else local
            buffers.append(BufferPlan(names[id(buffer)], path_of_buffer, buffer.shape, buffer.dtype))
    return buffers


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let the parameters of `model` whose names fit one of the shell-style `patterns` require no gradient.

    Raises:
        ValueError: a pattern fits no name, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        found = fnmatch.filter(parameters, pattern)
        if not found:
            raise ValueError(
                f"freeze={pattern!r} fits no parameter of {type(model).__name__}, whose first and last are "
                f"{next(iter(parameters))} and {next(reversed(parameters))}"
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(f"freeze={list(patterns)} leaves no parameter to train")

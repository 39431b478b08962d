"""The experts of a mixture layer in parts, so that the device need not hold a whole layer.

Such a layer becomes its dense part, which is everything but the experts, and several parts with some experts each. The
arenas stay those of the whole layer. The dense part runs with a recorder in place of the experts, which notes what they
would get and returns zeros; what the experts return is added to the layer's output later. That a family adds it, and
does nothing else with it, is read from the graph of its layer when the model is planned.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from megatrain_verl.streaming.layer_arguments import DecoderSkeleton
from megatrain_verl.streaming.linear_attention import is_linear_attention
from megatrain_verl.streaming.model_units import ALIGNMENT, ParameterSpan, Range, UnitPlan

EXPERTS = "experts"  # transformers' name of the module with the routed experts, in every family
# Steps of autograd through which a sum stays a sum: addition, other shapes of the same rows, other types.
ADDITIVE = {"AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ToCopyBackward0"}

ExpertInputs = tuple[Tensor, Tensor, Tensor]  # hidden states (N, H), experts (N, K) int64, their weights (N, K)


class ExpertsRecorder(nn.Module):
    """Stands for the experts of a layer: notes what they get and adds nothing, or `output`."""

    def __init__(self, output: Tensor | None = None) -> None:
        super().__init__()
        self._output = output
        self._inputs: ExpertInputs | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self._inputs = hidden_states, top_k_index, top_k_weights
        return torch.zeros_like(hidden_states) if self._output is None else self._output

    def take(self) -> ExpertInputs:
        """What the last call got; it is not kept any longer."""
        inputs, self._inputs = self._inputs, None
        return inputs


@dataclass
class PartPlan(UnitPlan):
    """A part of a layer's plan; `spans` lie in the part, with the layer's names.

    `experts`: path of the experts in the layer. `first`, `count`: which of them are here; none in the dense part.
    """

    experts: str = EXPERTS
    first: int = 0
    count: int = 0
    where: list[Range] = field(default_factory=list)

    def ranges(self) -> list[Range]:
        return self.where

    def module_of(self, layer: nn.Module) -> nn.Module:
        """The layer with a recorder in place of the experts, or `count` experts alone."""
        if self.count == 0:
            layer.set_submodule(self.experts, ExpertsRecorder())
            return layer
        experts = layer.get_submodule(self.experts)
        experts.num_experts = self.count
        return experts

    def recorder(self, template: nn.Module) -> ExpertsRecorder:
        """That of the module which computes with the dense part."""
        return template.get_submodule(self.experts)

    def add(self, span: ParameterSpan, local: str, rows: slice | None = None) -> None:
        """Append a tensor of the layer, or some rows of it."""
        first, last = (0, 1) if rows is None else (rows.start, rows.stop)
        shape = span.shape if rows is None else torch.Size([last - first, *span.shape[1:]])
        row = span.numel if rows is None else span.numel // span.shape[0]
        mine = replace(span, local=local, shape=shape, offset=self.numel)
        self.spans.append(mine)
        start = span.offset + first * row
        if rows is None and self.where and start - mine.offset == self.where[-1].arena - self.where[-1].device:
            before = self.where.pop()  # the tensor before it is its neighbour in the arenas too: one copy for both
            self.where.append(before._replace(numel=mine.offset + mine.numel - before.device))
        else:
            self.where.append(Range(start, mine.offset, mine.numel))
        self.numel += -(-mine.numel // ALIGNMENT) * ALIGNMENT


def split_layers(units: list[UnitPlan], structures: list[nn.Module], decoder: nn.Module, parts: int) -> None:
    """Give every layer with experts its parts: the dense one and `parts` of about as many experts each.

    Raises:
        ValueError: there are no experts, fewer than `parts`, or such that cannot be streamed apart; names the family.
    """
    found = [_find_experts(layer) for layer in structures]
    if not any(found):
        raise ValueError(f"expert_parts={parts} is for mixtures; {type(decoder).__name__} has no experts: leave it out")
    arguments = DecoderSkeleton(decoder, "cpu").arguments(torch.arange(2)[None], [2], torch.float32)
    for number, (unit, named) in enumerate(zip(units, arguments, strict=True)):
        path, layer = found[unit.structure], structures[unit.structure]
        if path is None:
            continue
        if all(before.structure != unit.structure for before in units[:number]):
            _check_experts(layer, path, parts)
            _check_additive(layer, path, decoder.config.hidden_size, named)
        unit.parts = _split(unit, path, layer.get_submodule(path).num_experts, parts)


def separable_experts(layers: Iterable[nn.Module]) -> int:
    """How many experts each of `layers` has that can be streamed apart; 0 without experts, or with another kind."""
    paths = ((layer, _find_experts(layer)) for layer in layers)
    return min((_separable(layer.get_submodule(path)) for layer, path in paths if path is not None), default=0)


def _split(unit: UnitPlan, path: str, num_experts: int, parts: int) -> list[UnitPlan]:
    bounds = [num_experts * number // parts for number in range(parts + 1)]
    dense = PartPlan(unit.name, [], 0, unit.structure, experts=path)
    chunks = [
        PartPlan(f"{unit.name}.experts.{first}", [], 0, unit.structure, experts=path, first=first, count=last - first)
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]
    for span in unit.spans:
        local = span.local.removeprefix(path + ".")
        if local == span.local:
            dense.add(span, local)
            continue
        for chunk in chunks:
            chunk.add(span, local, slice(chunk.first, chunk.first + chunk.count))
    return [dense, *chunks]


def _find_experts(layer: nn.Module) -> str | None:
    return next((path for path, _ in layer.named_modules() if path.rpartition(".")[2] == EXPERTS), None)


def _check_experts(layer: nn.Module, path: str, parts: int) -> None:
    experts = layer.get_submodule(path)
    name, number = type(experts).__name__, _separable(experts)
    if number == 0:
        raise ValueError(
            f"expert_parts={parts} needs experts whose tensors have one row each and that are called with hidden "
            f"states, choices and weights; {name} is another kind: leave expert_parts out"
        )
    if parts > number:
        raise ValueError(f"expert_parts={parts}: a layer of {name} has {number} experts; set it to {number} at most")


def _separable(experts: nn.Module) -> int:
    """The number of `experts`, or 0 if they are no module that some of them can stand in for."""
    number = getattr(experts, "num_experts", 0)
    merged = all("." not in local and tensor.shape[0] == number for local, tensor in experts.named_parameters())
    called = len(inspect.signature(experts.forward).parameters) == 3
    return number if merged and called and not any(experts.buffers()) else 0


def _check_additive(layer: nn.Module, path: str, hidden_size: int, arguments: dict[str, object]) -> None:
    """Refuse a layer that does something else with the output of its experts than to add it to its own.

    The layer runs on the meta device, where only that output has a graph.
    """
    layer = copy.deepcopy(layer).float().eval().requires_grad_(False)
    for module in layer.modules():
        if is_linear_attention(module):  # its kernels may need a GPU
            module.forward = _pass_on
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    leaf = torch.empty(2, hidden_size, device="meta", requires_grad=True)
    layer.set_submodule(path, ExpertsRecorder(leaf))
    output = layer(torch.empty(1, 2, hidden_size, device="meta"), **_on_meta(arguments))
    steps = list(_paths(output.grad_fn))
    ends = [step for step in steps if step.name().endswith("AccumulateGrad")]
    inner = [step for step in steps if step not in ends]
    sums = all(step.name() in ADDITIVE and getattr(step, "_saved_alpha", 1) == 1 for step in inner)
    if not sums or len(ends) != 1 or output.numel() != leaf.numel():
        raise ValueError(
            f"{type(layer).__name__} does more with the output of its experts than to add it to its own "
            f"({', '.join(step.name() for step in inner)}): expert_parts is not supported for it"
        )


def _pass_on(hidden_states: Tensor, **unused: object) -> Tensor:
    return hidden_states


def _on_meta(value: object) -> object:
    if isinstance(value, dict):
        return {name: _on_meta(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_on_meta(part) for part in value)
    return value.to("meta") if isinstance(value, Tensor) else value


def _paths(step: Node) -> Iterator[Node]:
    """Every step of autograd on every path from `step` to its leaves."""
    yield step
    for following, _ in step.next_functions:
        if following is not None:
            yield from _paths(following)

"""How a family's published checkpoints name and cut the parameters of its transformers model.

transformers 5 renames weights and merges experts when it loads a model, and does the reverse when it saves one. Its own
mapping is used here: the reverse of it, applied to a parameter on the meta device, shows which block of the parameter
each tensor of a checkpoint is. So a tensor is written straight into its block of the host arena, and exported as a view
of it; no merged or split copy exists.
"""

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

# Old Llama checkpoints store a buffer that follows from the config.
IGNORED = (r"rotary_emb\.inv_freq$",)


@dataclass(frozen=True)
class Block:
    """A contiguous part of a parameter that checkpoints hold as a tensor of its own; or all of it.

    `name` is the checkpoint's, before the mapping's renamings; `offset` counts elements from the parameter's start.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Place:
    """Where a checkpoint's tensor belongs: `name` is what the model calls it, which may be an alias of `parameter`."""

    name: str
    parameter: str
    block: Block


class HubLayout:
    """Checkpoint name -> block of a parameter, and back.

    Args:
        model: the transformers model on the meta device.
        names: the parameters (and buffers) that are loaded and exported, by their names in `model`.
        aliases: other names of tied parameters, which checkpoints may use too.
        transforms: transformers' weight transforms to undo on export; by default what it undoes when it saves a model
            that was made from a config.

    Raises:
        ValueError: transformers converts a parameter in a way that is no block of it; names the parameter.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: Iterable[str],
        aliases: Mapping[str, str],
        transforms: list[WeightTransform] | None = None,
    ) -> None:
        self._model, self._names, self._aliases = model, tuple(names), aliases
        known = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [transform for transform in known if not isinstance(transform, WeightConverter)]
        if transforms is None:
            transforms = [transform for transform in known if not isinstance(transform, PrefixChange)]
        reverse = [transform.reverse_transform() for transform in reversed(transforms)]
        self._reverse_converters = [transform for transform in reverse if isinstance(transform, WeightConverter)]
        self._reverse_renamings = [transform for transform in reverse if isinstance(transform, WeightRenaming)]
        self._ignored = [
            re.compile(pattern) for pattern in (*IGNORED, *(model._keys_to_ignore_on_load_unexpected or ()))
        ]
        self._blocks = {name: self._blocks_of(name) for name in self._names}
        blocks = [Place(block.name, name, block) for name in self._names for block in self._blocks[name]]
        # Files that transformers 5 wrote may hold merged parameters.
        merged = [Place(name, name, Block(name, tuple(_tensor(model, name).shape))) for name in self._names]
        self._places = {place.name: place for place in (*merged, *blocks)}
        self._places |= {alias: replace(self._places[name], name=alias) for alias, name in aliases.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and buffers that are loaded and exported, by their names in the model."""
        return self._names

    def blocks(self, name: str) -> list[Block]:
        """The blocks that make up the parameter `name`, in a checkpoint of this layout."""
        return self._blocks[name]

    def find(self, name: str) -> Place | None:
        """Where the checkpoint's tensor `name` belongs; None if nowhere.

        The prefix of the base model may be missing.
        """
        prefix = self._model.base_model_prefix
        renamed, _ = rename_source_key(name, self._renamings, [], prefix, self._places)
        if renamed not in self._places:
            renamed, _ = rename_source_key(name, [], [], prefix, self._places)
        return self._places.get(renamed)

    def ignores(self, name: str) -> bool:
        """Whether transformers leaves the checkpoint's tensor `name` out without a word, as those of MTP layers."""
        return any(pattern.search(name) for pattern in self._ignored)

    def checkpoint_name(self, block: Block) -> str:
        """What a checkpoint of this layout calls `block`."""
        return rename_source_key(block.name, self._reverse_renamings, [])[0]

    def export(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, view) of the blocks of the contiguous `tensor` that holds the parameter `name`."""
        flat = tensor.view(-1)
        for block in self._blocks[name]:
            yield self.checkpoint_name(block), flat[block.offset : block.offset + block.numel].view(block.shape)

    def as_in(self, names: Iterable[str]) -> "HubLayout":
        """The layout of a checkpoint with the tensors `names`: only the transforms that its names need are undone."""
        transforms = get_model_conversion_mapping(self._model, add_legacy=False)
        renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        for name in names:
            rename_source_key(name, renamings, converters)
        used = [transform for transform in transforms if transform.was_used()]
        return HubLayout(self._model, self._names, self._aliases, used)

    def _blocks_of(self, name: str) -> list[Block]:
        tensor = _tensor(self._model, name)
        renamed, pattern = rename_source_key(name, [], self._reverse_converters)
        if pattern is None:
            return [Block(name, tuple(tensor.shape))]
        converter = copy.deepcopy(next(c for c in self._reverse_converters if pattern in c.source_patterns))
        if len(converter.source_patterns) > 1:
            raise ValueError(
                f"{type(self._model).__name__}: {name} is one of several parameters that checkpoints merge"
            )
        converter.add_tensor(renamed, name, pattern, tensor)
        parts = converter.convert(renamed, model=self._model, config=self._model.config)
        blocks = []
        for part_name, part in parts.items():
            part = part[0] if isinstance(part, list) else part
            if part.untyped_storage()._cdata != tensor.untyped_storage()._cdata or not part.is_contiguous():
                operations = ", ".join(type(operation).__name__ for operation in converter.operations)
                raise ValueError(
                    f"checkpoints of {type(self._model).__name__} hold {name} changed by {operations}, which is not "
                    "supported"
                )
            blocks.append(Block(part_name, tuple(part.shape), part.storage_offset() - tensor.storage_offset()))
        return blocks


def _tensor(model: PreTrainedModel, name: str) -> Tensor:
    path, _, local = name.rpartition(".")
    return getattr(model.get_submodule(path), local).detach()

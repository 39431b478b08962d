"""Batches that verl's trainer hands to the actor's worker, in safetensors files: numbers only, no pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

OFFSETS = ".offsets"  # rows of a jagged tensor are saved one after the other, and where they start


def save(batch: TensorDict, file: Path) -> None:
    """Write tensors (dense or jagged) and options of `batch`; what is neither (texts of a row, say) is left out."""
    tensors: dict[str, Tensor] = {}
    options: dict[str, Any] = {}
    for name in batch.keys():
        value = tu.get(batch, name)
        if isinstance(value, Tensor) and value.is_nested:
            tensors[name] = value.values().clone()  # two names of a batch may share memory, which the format refuses
            tensors[name + OFFSETS] = value.offsets().clone()
        elif isinstance(value, Tensor):
            tensors[name] = value.contiguous().clone()
        elif _is_option(value):
            options[name] = value
    partial = file.with_suffix(".partial")
    save_file(tensors, partial, metadata={"options": json.dumps(options), "rows": str(len(batch))})
    partial.rename(file)


def load(file: Path) -> TensorDict:
    """The batch that `save` wrote."""
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        saved = {name: opened.get_tensor(name) for name in opened.keys()}
    tensors = {}
    for name, value in saved.items():
        if name.endswith(OFFSETS):
            continue
        offsets = saved.get(name + OFFSETS)
        tensors[name] = value if offsets is None else torch.nested.nested_tensor_from_jagged(value, offsets)
    return tu.get_tensordict(tensors, json.loads(metadata["options"]))


def files(folder: Path) -> list[Path]:
    """The batches of a recorded run, in order.

    Raises:
        ValueError: there are none.
    """
    found = sorted(folder.glob("batch_*.safetensors"))
    if not found:
        raise ValueError(f"no batch_*.safetensors in {folder}: record a run there first (benchmarks/replay/grpo.sh)")
    return found


def _is_option(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_option(entry) for key, entry in value.items())
    return value is None or isinstance(value, bool | int | float | str)

"""Checkpoints of the host arenas, unit by unit, and the export to Hugging Face files; both appear whole or not at all.

A checkpoint folder holds one safetensors file per unit (flat `weight`, `low`, `exp_avg`, `exp_avg_sq`, as the engine
keeps them) and `state.json`: format version, model, contents and the caller's `meta`. Gradients and the reference
policy are not in it.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PretrainedConfig

from megatrain_verl.streaming.atomic_folder import atomic_folder, check_disk_space, restore_replaced
from megatrain_verl.streaming.host_store import SPLIT_CHUNK, ParameterState, UnitState, arena_elements
from megatrain_verl.streaming.master_weights import join_master, split_master
from megatrain_verl.streaming.model_plan import ModelPlan, model_class
from megatrain_verl.streaming.quantised_weights import without_quantization

FORMAT_VERSION = 1
STATE_FILE = "state.json"
CONTENTS = {"model": ("weight", "low"), "optimizer": ("exp_avg", "exp_avg_sq")}


def save_state(
    folder: str | Path,
    plan: ModelPlan,
    state: ParameterState,
    meta: dict[str, object],
    wait: Callable[[UnitState], None],
    contents: Collection[str] = tuple(CONTENTS),
) -> None:
    """Write the arenas of `state`, bit for bit, and `meta` (JSON values) to `folder`, atomically.

    `wait(unit)` is called before a unit is read, so that saving overlaps a pending AdamW. `contents` is "model",
    "optimizer" or both.

    Raises:
        ValueError: unknown contents, or too little disk space.
    """
    _check_contents(contents)
    arenas = [
        {kind: getattr(unit, kind) for kind in _kinds(contents, unit)} | (unit.buffers if "model" in contents else {})
        for unit in state.units
    ]
    check_disk_space(folder, sum(arena.nbytes for unit in arenas for arena in unit.values()))
    with atomic_folder(folder) as partial:
        for unit, kinds in zip(_bar(state.units, "saving"), arenas, strict=True):
            wait(unit)
            save_file(kinds, _unit_file(partial, unit))
        saved = {
            "format_version": FORMAT_VERSION,
            "model": _describe(plan),
            "contents": list(contents),
            "meta": meta,
        }
        (partial / STATE_FILE).write_text(json.dumps(saved, indent=1))


def load_state(
    folder: str | Path, plan: ModelPlan, state: ParameterState, contents: Collection[str] = tuple(CONTENTS)
) -> dict[str, object]:
    """Fill the arenas of `state` from what `save_state` wrote and return its `meta` (see `read_meta`).

    The master weights may have been saved in the other form (float32 or two halves): the change is exact. Every
    unit's reference is kept before its weights change.

    Raises:
        ValueError: not a checkpoint, one of another model or format, without the `contents`, or with missing or
            damaged files; before anything is overwritten.
    """
    _check_contents(contents)
    folder = Path(folder)
    restore_replaced(folder)
    saved = _read_state_file(folder)
    _check_model(folder, saved["model"], _describe(plan))
    if absent := [name for name in contents if name not in saved["contents"]]:
        raise ValueError(
            f"{folder} holds no {' and no '.join(absent)} state, only {', '.join(saved['contents'])}; "
            "load only what was saved"
        )
    for unit in state.units:
        _check_unit_file(folder, unit, contents)

    for unit in _bar(state.units, "loading"):
        with safe_open(_unit_file(folder, unit), framework="pt") as file:
            if "model" in contents:
                unit.keep_reference()
                _load_master(unit, file)
                for name, buffer in unit.buffers.items():
                    buffer.copy_(file.get_tensor(name))
            if "optimizer" in contents:
                for kind in _kinds(["optimizer"], unit):
                    getattr(unit, kind).copy_(file.get_tensor(kind))
    return saved["meta"]


def _bar(units: list[UnitState], desc: str) -> Iterable[UnitState]:
    """`units` behind a bar that appears after two seconds, and on a terminal only."""
    return tqdm(units, desc=desc, unit=" units", delay=2, disable=None)


def read_meta(folder: str | Path) -> dict[str, object]:
    """The `meta` that `save_state` wrote.

    Raises:
        ValueError: not a checkpoint.
    """
    return _read_state_file(Path(folder))["meta"]


def export_pretrained(
    folder: str | Path,
    named_weights: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    num_bytes: int,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads, atomically and without copying the weights.

    `named_weights` yields (Hugging Face name, CPU tensor), tied weights once, `num_bytes` in all; they must stay
    unchanged until this returns.

    Raises:
        ValueError: too little disk space.
    """
    check_disk_space(folder, num_bytes)
    with atomic_folder(folder) as partial:
        dtype = write_shards(partial, named_weights, max_shard_bytes)
        exported = without_quantization(config)
        exported.architectures = [model_class(config)._model_mapping[type(config)].__name__]
        exported.dtype = dtype
        exported.save_pretrained(partial)


def write_shards(
    folder: Path, named_weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int = 5_000_000_000
) -> torch.dtype:
    """Write `named_weights` to `folder` as safetensors with an index; returns the type of the first, the embedding's.

    At most one file's tensors are held at a time.
    """
    shards: list[list[str]] = []
    total, dtype = 0, None
    for tensors in _group(named_weights, max_shard_bytes):
        shards.append(list(tensors))
        save_file(tensors, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        dtype = dtype or next(iter(tensors.values())).dtype
    _name_shards(folder, shards, total)
    return dtype


def _check_contents(contents: Collection[str]) -> None:
    unknown = [name for name in contents if name not in CONTENTS]
    if unknown or not contents:
        raise ValueError(f"contents must be some of {', '.join(CONTENTS)}, got {list(contents)}")


def _kinds(contents: Collection[str], unit: UnitState) -> list[str]:
    """The kinds of arena that `contents` stands for, of those that `unit` has."""
    return [kind for name in contents for kind in CONTENTS[name] if getattr(unit, kind) is not None]


def _unit_file(folder: Path, unit: UnitState) -> Path:
    return folder / f"{unit.plan.name}.safetensors"


def _describe(plan: ModelPlan) -> dict[str, object]:
    """What a checkpoint must have in common with the engine that loads it: every parameter's name, place and shape."""
    units = {
        unit.name: {span.name: {"offset": span.offset, "shape": list(span.shape)} for span in unit.spans}
        for unit in plan.units
    }
    described = {"model_type": plan.config.model_type, "num_parameters": plan.num_parameters, "units": units}
    frozen = [span.name for unit in plan.units for span in unit.spans if not span.trainable]
    lora = plan.lora and {"rank": plan.lora.config.r, "alpha": plan.lora.config.lora_alpha}
    return described | ({"frozen": frozen} if frozen else {}) | ({"lora": lora} if lora else {})


def _read_state_file(folder: Path) -> dict:
    if not (folder / STATE_FILE).is_file():
        raise ValueError(f"{folder} is not a checkpoint of this engine: it has no {STATE_FILE}")
    try:
        saved = json.loads((folder / STATE_FILE).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / STATE_FILE} is damaged: {error}") from error
    if saved.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has checkpoint format {saved.get('format_version')}; this version reads {FORMAT_VERSION}"
        )
    return saved


def _check_model(folder: Path, saved: dict, own: dict) -> None:
    if saved == own:
        return
    if saved.get("lora") != own.get("lora"):
        settings = [f"LoRA {each['lora']}" if "lora" in each else "no LoRA" for each in (saved, own)]
        raise ValueError(
            f"{folder} was saved with {settings[0]}, the engine has {settings[1]}: set lora_rank and lora_alpha "
            "as they were"
        )
    if saved.get("frozen", []) != own.get("frozen", []):
        counts = [len(each.get("frozen", [])) for each in (saved, own)]
        raise ValueError(
            f"{folder} was saved with {counts[0]} frozen parameters, the engine freezes {counts[1]} or others: set "
            "freeze as it was"
        )
    parameters = [
        {
            name: f"{tuple(place['shape'])} at {place['offset']}"
            for unit in each["units"].values()
            for name, place in unit.items()
        }
        for each in (saved, own)
    ]
    names = [name for name in {**parameters[0], **parameters[1]} if parameters[0].get(name) != parameters[1].get(name)]
    difference = ""
    if names:
        there, here = (each.get(names[0], "absent") for each in parameters)
        difference = f"; {names[0]} is {there} in the checkpoint and {here} in the engine"
    descriptions = [f"{each['model_type']} with {each['num_parameters']:,} parameters" for each in (saved, own)]
    raise ValueError(
        f"{folder} is a checkpoint of another model: it holds {descriptions[0]}, the engine runs {descriptions[1]}"
        + difference
    )


def _check_unit_file(folder: Path, unit: UnitState, contents: Collection[str]) -> None:
    path = _unit_file(folder, unit)
    if not path.is_file():
        raise ValueError(f"{folder} is incomplete: {path.name} is missing")
    try:
        with safe_open(path, framework="pt") as file:
            sizes = {kind: file.get_slice(kind).get_shape() for kind in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    expected = ["weight", *(kind for kind in sizes if kind == "low")] if "model" in contents else []
    expected += _kinds(["optimizer"], unit) if "optimizer" in contents else []
    if "model" in contents:
        for buffer in unit.plan.buffers:
            if sizes.get(buffer.name) != list(buffer.shape):
                raise ValueError(f"{path} is damaged: {buffer.name} has shape {sizes.get(buffer.name)}")
    for kind in expected:
        numel = arena_elements(kind, unit.plan.numel, unit.plan.trained)
        if sizes.get(kind) != [numel]:
            raise ValueError(f"{path} is damaged: {kind} has shape {sizes.get(kind)} instead of [{numel}]")


def _load_master(unit: UnitState, file: safe_open) -> None:
    """Set `weight` and `low` from either form of the master. Forms that agree are copied as they are."""
    weight = file.get_tensor("weight")
    low = file.get_tensor("low") if "low" in file.keys() else None
    if weight.dtype is unit.weight.dtype:
        unit.weight.copy_(weight)
        if unit.low is not None:
            unit.low.zero_() if low is None else unit.low.copy_(low)
        return
    trained = unit.plan.trained
    unit.weight[trained:].copy_(weight[trained:])
    for start in range(0, trained, SPLIT_CHUNK):
        part = slice(start, min(start + SPLIT_CHUNK, trained))
        master = weight[part].float() if low is None else join_master(weight[part], low[part])
        if unit.low is None:
            unit.weight[part].copy_(master)
        else:
            split_master(master, unit.weight[part], unit.low[part])


def _group(named_weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive weights in groups of at most `max_bytes`, or of one weight that is larger."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_weights:
        if group and size + tensor.nbytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    yield group


def _name_shards(folder: Path, shards: list[list[str]], num_bytes: int) -> None:
    """Give the files 1.safetensors, 2.safetensors, ... their final names, which hold their number, and index them."""
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))

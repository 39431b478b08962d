"""Checkpoint weights into the host arenas, a tensor or a part of one at a time: no second copy of the model exists."""

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatrain_verl.streaming.host_store import SPLIT_CHUNK, ParameterState, UnitState
from megatrain_verl.streaming.hub_layout import Place
from megatrain_verl.streaming.model_plan import ModelPlan
from megatrain_verl.streaming.model_units import ParameterSpan
from megatrain_verl.streaming.quantised_weights import StoredWeight, stored_weights
from megatrain_verl.streaming.weight_folder import WeightFolder, some

logger = logging.getLogger(__name__)

# As safetensors headers and torch call the types that weights may have; float8 and integers are quantised weights.
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64", "torch.bfloat16", "torch.float16", "torch.float32", "torch.float64")


def load_into(state: ParameterState, plan: ModelPlan, source: str | Path | Iterable[tuple[str, Tensor]]) -> None:
    """Set every master weight of `state` from a folder of safetensors or from (name, CPU tensor) pairs.

    Names and shapes are those of the family's checkpoints or of its transformers model (experts apart or merged); the
    prefix of the base model may be missing. A tied weight may come under either of its names, or under both with the
    same values. A folder is checked in full before anything is read, and `plan.hub` becomes its layout, so that an
    export has the names of the folder. Quantised folders: see `quantised_weights`.

    Raises:
        ValueError: parameters that are missing, unknown, repeated, of another shape or quantised; names the first few.
    """
    if isinstance(source, str | Path):
        with WeightFolder(source) as folder:
            _load_folder(state, plan, folder)
        return
    checks = _Checklist(plan)
    with _Writer(state, plan) as writer:
        for name, tensor in source:
            place = checks.admit(name, tensor.shape, str(tensor.dtype))
            if place is not None:
                writer.write(place, [(0, tensor)])
    checks.finish()


def take_layout(plan: ModelPlan, source: str | Path | Iterable[tuple[str, Tensor]]) -> None:
    """Let `plan.hub` become what `load_into` makes of it, for a process whose weights another one loads.

    Raises:
        ValueError: a folder that cannot be read; names it.
    """
    if isinstance(source, str | Path):
        with WeightFolder(source) as folder:
            _take_layout(plan, stored_weights(folder))


def _take_layout(plan: ModelPlan, weights: list[StoredWeight]) -> None:
    plan.hub = plan.hub.as_in(weight.header.name for weight in weights)


def _load_folder(state: ParameterState, plan: ModelPlan, folder: WeightFolder) -> None:
    weights = stored_weights(folder)
    _take_layout(plan, weights)
    checks = _Checklist(plan)
    places = [checks.admit(w.header.name, w.header.shape, w.header.dtype) for w in weights]
    checks.finish()
    if checks.ignored:
        logger.warning(
            "%s holds %d weights that the %s model of transformers does not have, as those that only predict further "
            "tokens; they are left out: %s",
            folder.path,
            len(checks.ignored),
            plan.config.model_type,
            some(checks.ignored),
        )
    with _Writer(state, plan) as writer:
        for weight, place in zip(weights, places, strict=True):
            if place is not None:
                writer.write(place, weight.parts())


class _Writer:
    """Writes blocks of parameters to the arenas, and compares the second copy of a tied one with the first."""

    def __init__(self, state: ParameterState, plan: ModelPlan) -> None:
        self._plan = plan
        self._targets = {span.name: (unit, span) for unit, span in state.parameters()}
        self._buffers = {name: buffer for unit in state.units for name, buffer in unit.buffers.items()}
        self._written: set[str] = set()
        # Shown from the third second on, so not for small models, and on a terminal only.
        total = plan.num_parameters
        self._bar = tqdm(
            total=total, unit=" parameters", unit_scale=True, desc="loading weights", delay=2, disable=None
        )

    def write(self, place: Place, parts: Iterable[tuple[int, Tensor]]) -> None:
        """Write `parts`, (first element, values), of the block at `place`."""
        if place.parameter in self._buffers:
            for start, values in parts:
                self._buffers[place.parameter].view(-1)[start : start + values.numel()].copy_(values.reshape(-1))
            return
        unit, span = self._targets[place.parameter]
        for start, values in parts:
            part = ParameterSpan(span.name, span.local, values.shape, span.offset + place.block.offset + start)
            if place.block.name in self._written:
                _check_tied(self._plan, unit, part, values)
            else:
                unit.write(part, values)
                self._bar.update(values.numel())
        self._written.add(place.block.name)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class _Checklist:
    """The parameters of a plan, ticked off as weights come by; everything wrong is reported at the end at once."""

    def __init__(self, plan: ModelPlan) -> None:
        self._hub = plan.hub
        self._parameters = plan.hub.names
        self._model_type = plan.config.model_type
        self._names: set[str] = set()
        self._present: set[str] = set()
        self.ignored: list[str] = []
        self._unknown: list[str] = []
        self._repeated: list[str] = []
        self._misshapen: list[str] = []
        self._quantised: list[str] = []

    def admit(self, name: str, shape: torch.Size, dtype: str) -> Place | None:
        """Where the weight `name` belongs, or None if it must not be loaded."""
        place = self._hub.find(name)
        if place is None:
            (self.ignored if self._hub.ignores(name) else self._unknown).append(name)
            return None
        block, wrong = place.block, None
        if place.name in self._names or self._overlaps(place):
            wrong, what = self._repeated, name
        elif dtype not in FLOAT_DTYPES:
            wrong, what = self._quantised, f"{name} ({dtype.removeprefix('torch.')})"
        elif tuple(shape) != block.shape:
            wrong, what = self._misshapen, f"{name} {tuple(shape)} instead of {block.shape}"
        self._names.add(place.name)
        self._present.add(block.name)
        if wrong is not None:
            wrong.append(what)
            return None
        return place

    def _overlaps(self, place: Place) -> bool:
        """Whether the merged parameter has come and this is a part of it, or the reverse."""
        if place.block.name != place.parameter:
            return place.parameter in self._present
        parts = (block.name for block in self._hub.blocks(place.parameter))
        return any(name in self._present for name in parts if name != place.parameter)

    def finish(self) -> None:
        """Raise unless every parameter has come exactly once and as it should be."""
        faults = {
            "quantised": self._quantised,
            "of another shape": self._misshapen,
            "missing": [name for parameter in self._parameters for name in self._missing(parameter)],
            "unknown": self._unknown,
            "given twice": self._repeated,
        }
        found = [f"{len(names)} {fault}: {some(names)}" for fault, names in faults.items() if names]
        if self._quantised:
            found.append("full-parameter training needs bfloat16, float16 or float32 weights: dequantise them first")
        elif found:
            found.append("do config.json and the weight files belong together?")
        if found:
            raise ValueError(f"these weights do not fit the {self._model_type} model: " + "; ".join(found))

    def _missing(self, parameter: str) -> list[str]:
        """Checkpoint names of what lacks of a parameter: the parameter itself if all of it."""
        if parameter in self._present:
            return []
        blocks = self._hub.blocks(parameter)
        missing = [block for block in blocks if block.name not in self._present]
        return [parameter] if len(missing) == len(blocks) else [self._hub.checkpoint_name(block) for block in missing]


def _check_tied(plan: ModelPlan, unit: UnitState, span: ParameterSpan, value: Tensor) -> None:
    """Refuse two names of one tied weight with different values: transformers would run that model untied."""
    flat = value.reshape(-1)
    for start in range(0, span.numel, SPLIT_CHUNK):
        end = min(start + SPLIT_CHUNK, span.numel)
        stored = unit.master(span.offset + start, span.offset + end)
        # A forward-only bfloat16 engine has rounded what it stored.
        expected = (
            flat[start:end].to(torch.float32 if unit.is_split(span.offset) else unit.weight.dtype).to(torch.float32)
        )
        if not torch.equal(stored, expected):
            names = " and ".join([span.name, *(alias for alias, name in plan.aliases.items() if name == span.name)])
            raise ValueError(
                f"the config ties {names}, but the weight files hold different values for them; "
                "if the model is untied, set tie_word_embeddings to false in its config.json"
            )

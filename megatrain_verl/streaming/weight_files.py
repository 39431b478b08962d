"""Hugging Face safetensors into the host arenas, one tensor at a time: no second copy of the model ever exists."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from megatrain_verl.streaming.host_store import SPLIT_CHUNK, ParameterState, UnitState
from megatrain_verl.streaming.model_plan import ModelPlan, ParameterSpan

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
# As safetensors headers and torch call the types that weights may have; float8 and integers are quantised weights.
FLOAT_DTYPES = ("BF16", "F16", "F32", "F64", "torch.bfloat16", "torch.float16", "torch.float32", "torch.float64")
# Old Llama checkpoints store a buffer that follows from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"
SHOWN = 5  # names in an error message


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight in a Hugging Face folder, shard by shard; tensors are views of the mapped file.

    Raises:
        ValueError: a missing folder, index or shard, a damaged file, or pickled weights only; names it.
    """
    for path in shard_paths(folder):
        with _open_shard(path) as shard:
            for name in shard.keys():
                yield name, shard.get_tensor(name)


def shard_paths(folder: str | Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, all of which exist.

    Raises:
        ValueError: see `read_weights`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the local folder of a downloaded model")
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        _refuse_pickled(folder)
        raise ValueError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; is the download complete?")
    try:
        names = json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX_FILE} is not a safetensors index: {error!r}; download it again") from error
    paths = [folder / name for name in dict.fromkeys(names)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {_some(missing)} of its {len(paths)} shards; download them again")
    return paths


def load_into(state: ParameterState, plan: ModelPlan, source: str | Path | Iterable[tuple[str, Tensor]]) -> None:
    """Set every master weight of `state` from a folder of safetensors or from (name, CPU tensor) pairs.

    Names may lack the "model." prefix, as in a file of the base model. A tied weight may come under either of its
    names, or under both with the same values. A folder is checked in full before anything is read.

    Raises:
        ValueError: parameters that are missing, unknown, repeated, of another shape or quantised; names the first few.
    """
    if isinstance(source, str | Path):
        checks = _Checklist(plan)
        for path in shard_paths(source):
            with _open_shard(path) as shard:
                for name in shard.keys():
                    header = shard.get_slice(name)
                    checks.admit(name, torch.Size(header.get_shape()), header.get_dtype())
        checks.finish()
        source = read_weights(source)

    targets = {span.name: (unit, span) for unit, span in state.parameters()}
    checks, written = _Checklist(plan), set()
    # Shown from the third second on, so not for small models.
    with tqdm(total=plan.num_parameters, unit=" parameters", unit_scale=True, desc="loading weights", delay=2) as bar:
        for name, tensor in source:
            target = checks.admit(name, tensor.shape, str(tensor.dtype))
            if target is None:
                continue
            if target in written:
                _check_tied(plan, *targets[target], tensor)
                continue
            targets[target][0].write(targets[target][1], tensor)
            written.add(target)
            bar.update(tensor.numel())
    checks.finish()


class _Checklist:
    """The parameters of a plan, ticked off as weights come by; everything wrong is reported at the end at once."""

    def __init__(self, plan: ModelPlan) -> None:
        self._shapes = {span.name: span.shape for unit in plan.units for span in unit.spans}
        self._aliases = plan.aliases
        self._model_type = plan.config.model_type
        self._names: set[str] = set()
        self._present: set[str] = set()
        self._unknown: list[str] = []
        self._repeated: list[str] = []
        self._misshapen: list[str] = []
        self._quantised: list[str] = []

    def admit(self, name: str, shape: torch.Size, dtype: str) -> str | None:
        """The parameter that the weight `name` belongs to, or None if it must not be loaded."""
        full = name if name in self._shapes or name in self._aliases else f"model.{name}"
        target = self._aliases.get(full, full)
        if target not in self._shapes:
            if not name.endswith(IGNORED_SUFFIX):
                self._unknown.append(name)
            return None
        wrong = None
        if full in self._names:
            wrong, what = self._repeated, name
        elif dtype not in FLOAT_DTYPES:
            wrong, what = self._quantised, f"{name} ({dtype.removeprefix('torch.')})"
        elif shape != self._shapes[target]:
            wrong, what = self._misshapen, f"{name} {tuple(shape)} instead of {tuple(self._shapes[target])}"
        self._names.add(full)
        self._present.add(target)
        if wrong is not None:
            wrong.append(what)
            return None
        return target

    def finish(self) -> None:
        """Raise unless every parameter has come exactly once and as it should be."""
        missing = [name for name in self._shapes if name not in self._present]
        faults = {
            "quantised": self._quantised,
            "of another shape": self._misshapen,
            "missing": missing,
            "unknown": self._unknown,
            "given twice": self._repeated,
        }
        found = [f"{len(names)} {fault}: {_some(names)}" for fault, names in faults.items() if names]
        if self._quantised:
            found.append("full-parameter training needs bfloat16, float16 or float32 weights: dequantise them first")
        elif found:
            found.append("do config.json and the weight files belong together?")
        if found:
            raise ValueError(f"these weights do not fit the {self._model_type} model: " + "; ".join(found))


def _check_tied(plan: ModelPlan, unit: UnitState, span: ParameterSpan, value: Tensor) -> None:
    """Refuse two names of one tied weight with different values: transformers would run that model untied."""
    flat = value.reshape(-1)
    for start in range(0, span.numel, SPLIT_CHUNK):
        end = min(start + SPLIT_CHUNK, span.numel)
        stored = unit.master(span.offset + start, span.offset + end)
        # A forward-only bfloat16 engine has rounded what it stored.
        expected = flat[start:end].to(unit.weight.dtype if unit.low is None else torch.float32).to(torch.float32)
        if not torch.equal(stored, expected):
            names = " and ".join([span.name, *(alias for alias, name in plan.aliases.items() if name == span.name)])
            raise ValueError(
                f"the config ties {names}, but the weight files hold different values for them; "
                "if the model is untied, set tie_word_embeddings to false in its config.json"
            )


@contextmanager
def _open_shard(path: Path) -> Iterator[safe_open]:
    try:
        shard = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); download it again") from error
    with shard:
        yield shard


def _refuse_pickled(folder: Path) -> None:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights only ({_some(pickled)}), which can run code when read; convert them with "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained(NEW_FOLDER)"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")

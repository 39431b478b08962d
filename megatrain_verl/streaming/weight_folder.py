"""The safetensors files of a local Hugging Face folder: their headers at once, their tensors one at a time."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
SHOWN = 5  # names in an error message


@dataclass(frozen=True)
class Header:
    """What a file says about a tensor; `dtype` as safetensors calls it (BF16, F8_E4M3, U8, ...)."""

    name: str
    shape: torch.Size
    dtype: str


class WeightFolder:
    """Every weight of a folder; a context that keeps the files open.

    Raises:
        ValueError: a missing folder, index or shard, a damaged file, or pickled weights only; names it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self._files = ExitStack()
        self._shards: dict[str, safe_open] = {}
        self.headers: list[Header] = []
        with ExitStack() as opened:
            for path in shard_paths(folder):
                shard = opened.enter_context(_open(path))
                for name in shard.keys():
                    header = shard.get_slice(name)
                    self.headers.append(Header(name, torch.Size(header.get_shape()), header.get_dtype()))
                    self._shards[name] = shard
            self._files = opened.pop_all()

    def __enter__(self) -> "WeightFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, a view of its mapped file."""
        return self._shards[name].get_tensor(name)


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight in a Hugging Face folder, shard by shard; tensors are views of the mapped file.

    Raises:
        ValueError: see `WeightFolder`.
    """
    with WeightFolder(folder) as weights:
        for header in weights.headers:
            yield header.name, weights.tensor(header.name)


def read_config(folder: str | Path) -> dict[str, object]:
    """What config.json of `folder` says; empty where there is none.

    Raises:
        ValueError: it is no JSON object.
    """
    file = Path(folder) / CONFIG_FILE
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object; download it again")
    return config


def shard_paths(folder: str | Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, all of which exist.

    Raises:
        ValueError: see `WeightFolder`.
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
        raise ValueError(f"{folder} lacks {some(missing)} of its {len(paths)} shards; download them again")
    return paths


def some(names: list[str]) -> str:
    """The first few of `names`, for a message."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); download it again") from error


def _refuse_pickled(folder: Path) -> None:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise ValueError(
            f"{folder} holds pickled weights only ({some(pickled)}), which can run code when read; convert them with "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained(NEW_FOLDER)"
        )

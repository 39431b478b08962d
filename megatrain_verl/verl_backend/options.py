"""Errors about option names, the same wherever an option is refused."""

import difflib
import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")

CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


def unknown_option(name: str, known: Iterable[str], where: str) -> ValueError:
    """The error for option `name` that `where` does not have, with the nearest of the `known` names."""
    return ValueError(f"unknown option {name} in {where}; {nearest_name(name, known)}")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """For an error: which of the `known` names `name` may have been meant to be, or all of them."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"


def refuse_unknown_options(where: str) -> Any:
    """Class decorator: a dataclass whose constructor refuses unknown keywords as `unknown_option` does."""

    def decorate(cls: type[T]) -> type[T]:
        generated = cls.__init__
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]

        @functools.wraps(generated)
        def __init__(self: T, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in known:
                    raise unknown_option(name, [field for field in known if not field.startswith("_")], where)
            generated(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[method-assign]
        return cls

    return decorate


def check_checkpoint_contents(config: Any) -> None:
    """Refuse contents in verl's `checkpoint` options that the engine does not know or cannot take apart.

    Raises:
        ValueError: names the option and the contents.
    """
    for option in ("save_contents", "load_contents"):
        contents = getattr(config, option)
        for name in contents:
            if name not in CHECKPOINT_CONTENTS:
                raise unknown_option(name, CHECKPOINT_CONTENTS, f"checkpoint.{option}")
        if ("model" in contents) != ("optimizer" in contents):
            raise ValueError(f"checkpoint.{option}={list(contents)}: model and optimizer are saved and loaded together")

"""Names that users write, checked against those that exist."""

from collections.abc import Iterable
from typing import Any

from megatrain_verl.verl_backend.options import nearest_name


def check_known(name: Any, known: Iterable[str], kind: str) -> None:
    """Refuse `name` unless it is one of `known`.

    Raises:
        ValueError: says what `kind` of name is unknown, and the nearest known one.
    """
    known = list(known)
    if name in known:
        return
    raise ValueError(f"{name!r} is not a {kind}; {nearest_name(str(name), known)}")

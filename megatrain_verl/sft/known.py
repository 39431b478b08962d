"""Names that users write, checked against those that exist."""

import difflib
from collections.abc import Iterable
from typing import Any


def check_known(name: Any, known: Iterable[str], kind: str) -> None:
    """Refuse `name` unless it is one of `known`.

    Raises:
        ValueError: says what `kind` of name is unknown, and the nearest known one.
    """
    known = list(known)
    if name in known:
        return
    nearest = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(sorted(known))}"
    raise ValueError(f"{name!r} is not a {kind}; {hint}")

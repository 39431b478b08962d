"""Every patch names the verl source it was written for, and refuses to touch any other."""

import hashlib
import inspect
import textwrap
from collections.abc import Callable

VERL_VERSION = "0.9.1"
DONE = "_megatrain_verl_patches"


def source_hash(function: Callable) -> str:
    """The first 16 hex digits of the SHA-256 of a function's dedented source."""
    return hashlib.sha256(textwrap.dedent(inspect.getsource(function)).encode()).hexdigest()[:16]


def check_source(patch: str, owner: object, hashes: dict[str, str]) -> None:
    """Compare functions of `owner` (a module or class) with the source that `patch` was written for.

    Raises:
        RuntimeError: a function is gone or its source differs; the message names the patch, the function and the cure.
    """
    for name, expected in hashes.items():
        function = getattr(owner, name, None)
        where = f"{getattr(owner, '__name__', owner)}.{name}"
        if function is None:
            found = "is gone"
        elif source_hash(function) != expected:
            found = "has changed"
        else:
            continue
        raise RuntimeError(
            f"verl_patches.{patch} was written for verl {VERL_VERSION}, but {where} {found}. Install "
            f"verl=={VERL_VERSION}, or set VERL_USE_EXTERNAL_PLUGINS=none to use verl without megatrain_verl."
        )


def first_time(patch: str, owner: object) -> bool:
    """True once per patch and owner; a patch applied twice would wrap its own wrapper."""
    done = owner.__dict__.get(DONE, frozenset())
    if patch in done:
        return False
    setattr(owner, DONE, done | {patch})
    return True

"""A failing test must not fail the tests after it."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from megatrain_verl.streaming.engine import StreamingEngine
from tests.conftest import PASSED


@pytest.fixture(autouse=True)
def engines_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the engines that a failed test leaves open: later tests need their memory and measure their own."""
    yield
    if request.node.stash.get(PASSED, False):
        return
    with ExitStack() as left:  # whatever one of them raises
        for engine in (thing for thing in gc.get_objects() if type(thing) is StreamingEngine):
            if not getattr(engine, "closed", True):  # what was refused while it was made takes its memory with it
                left.callback(engine.close)
    gc.collect()
    torch.cuda.empty_cache()

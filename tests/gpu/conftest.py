"""A failing test must not fail the tests after it."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.host_memory import HostBuffer
from tests.conftest import PASSED


@pytest.fixture(autouse=True)
def engines_end_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close what a failed test leaves open: its page-locked memory would be refused to the engines of later tests."""
    yield
    if request.node.stash.get(PASSED, False):
        return
    with ExitStack() as left:  # whatever one of them raises
        # Engines that did not come to be have buffers, too. Last in, first out: engines end before buffers.
        for kind in (HostBuffer, StreamingEngine):
            for made in (thing for thing in gc.get_objects() if type(thing) is kind):
                left.callback(made.close)
    gc.collect()
    torch.cuda.empty_cache()

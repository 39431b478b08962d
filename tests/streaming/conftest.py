"""Tests of the engine run on one thread: their work is tiny, and threads that wait for each other take most of it."""

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread: None) -> None:
    """See `one_thread`."""

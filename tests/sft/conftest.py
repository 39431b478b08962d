"""verl on the CPU platform, chosen before anything imports verl."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

import megatrain_verl.verl_backend.plugin  # noqa: E402, F401
from tests.sft.runs import RunServer  # noqa: E402


@pytest.fixture(scope="session")
def server() -> Iterator[RunServer]:
    """Forks runs of the command."""
    server = RunServer()
    yield server
    server.close()

"""Tests marked `gpu` are skipped on machines without a CUDA device; tests in two processes are grouped."""

from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before xdist, which reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # In tests/run.sh two processes share the tests. A file stays in one of them; Ray and vLLM, which take both cores,
    # never run twice at a time, and begin first, since they take longest.
    items.sort(key=lambda item: "ray" not in item.keywords)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if "ray" in item.keywords else item.path.name))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    # xdist 3.8.0 marks a group in the node id, which pytest 9.2 does not let it change: all groups are ignored there.
    if session.config.getoption("loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise RuntimeError("pytest-xdist has not grouped the tests: install the pinned pytest and pytest-xdist")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile, which examples/environment.sh turns off on a CPU; fails if the test has compiled nothing."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()

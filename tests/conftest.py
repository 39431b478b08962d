"""Tests marked `gpu` are skipped on machines without a CUDA device; tests in two processes are grouped."""

from collections.abc import Generator, Iterator

import pytest
import torch

PASSED = pytest.StashKey[bool]()  # of a test item: its own code has run without an error


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile, which examples/environment.sh turns off on a CPU; fails if a test passes and compiled nothing."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert compiled > 0 or not request.node.stash.get(PASSED, False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread in the test's thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""verl's calls in several data-parallel ranks: losses, norms and weights are those of one rank on the same rows."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.workers.config import HFModelConfig

from tests.verl_backend import rank_work

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([rank_work.__name__])


def run(folder: Path, model: HFModelConfig, shares: list[list[int]]) -> list[dict[str, Any]]:
    """The results of all ranks."""
    folder.mkdir()
    size = len(shares)
    common = size, str(folder / "store"), model.path, shares, str(folder / "checkpoint" / "global_step_3")
    with ProcessPoolExecutor(size, mp_context=CONTEXT) as pool:
        running = [pool.submit(rank_work.train, rank, *common) for rank in range(size)]
        return [rank.result(timeout=200) for rank in running]


@pytest.mark.timeout(900)
def test_two_ranks_equal_one(tiny: HFModelConfig, tmp_path: Path) -> None:
    (alone,) = run(tmp_path / "one", tiny, [[0, 1, 2, 3, 4, 5]])
    together = run(tmp_path / "two", tiny, [[0, 1, 2, 3], [4, 5]])
    assert [rank["ranks"] for rank in together] == [(0, 2), (1, 2)]
    for rank in together:
        assert np.allclose(rank["results"], alone["results"], rtol=1e-5, atol=1e-7)
        assert np.allclose(rank["scores"], alone["scores"], atol=1e-6)  # by the reference: the weights of the start
        worst = max(np.abs(rank["weights"][name] - alone["weights"][name]).max() for name in alone["weights"])
        assert worst < 1e-6, worst
    saved = {path.relative_to(tmp_path / "two") for path in (tmp_path / "two").rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()} == saved

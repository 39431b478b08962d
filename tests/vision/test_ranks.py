"""Several ranks with images: the rank without any takes part in the sums of the vision part."""

import copy

import numpy as np
import pytest

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.group.group import ALONE, Group
from tests import oracle
from tests.group import ranks
from tests.vision import cases

COUNTS = [0, 1, 0, 2]  # images per row
SHARES = [[0, 2], [1, 3]]


def train(group: Group, steps: int = 2) -> tuple[list[float], dict[str, np.ndarray]]:
    """Norms of the steps of this rank's share of the rows, and all masters at the end."""
    config = cases.tiny_config("qwen3_vl")
    settings = {"dtype": "float32", "optimizer_backend": "torch", "cpu_threads": 1}
    engine = StreamingEngine(config, StreamingConfig(**settings), AdamWConfig(lr=1e-3), device="cpu", group=group)
    engine.load_weights(cases.plain_model(copy.deepcopy(config)).state_dict().items())
    norms = []
    for step in range(steps):
        rows = cases.rows("qwen3_vl", COUNTS, seed=step)
        share = SHARES[group.rank] if group.size > 1 else sorted(sum(SHARES, []))
        engine.zero_grad()
        engine.forward_backward([cases.pack([rows[number]]) for number in share], lambda m, o: -o.log_probs.sum() / 99)
        norms.append(engine.optimizer_step())
    weights = {name: value.numpy().copy() for name, value in oracle.masters(engine).items()}
    engine.close()
    return norms, weights


@pytest.mark.slow
def test_two_ranks_of_which_one_has_no_image_equal_one() -> None:
    norms, weights = train(ALONE)
    for ended in ranks.run(train, 2):
        assert ended.error is None, ended.error
        assert np.allclose(ended.result[0], norms, rtol=1e-5)
        for name, value in ended.result[1].items():
            assert np.allclose(value, weights[name], rtol=1e-5, atol=1e-5), name

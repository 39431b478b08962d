"""Images in one step and none in the next, on simulated streams: every order that the waits allow gives the same bits.

Nothing of a pass without images reads the weights of encoder and projector, but their gradients are zeros then.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming import device_adamw
from megatrain_verl.streaming.simulated_streams import SimulatedStreams
from tests import oracle
from tests.vision import cases

# AdamW sizes the threads of the thread in which it runs, here that of the passes, and sums depend on their number.
pytestmark = pytest.mark.usefixtures("one_thread")
ORDERS = 8
ONLY_VISION = {"freeze": ["*language_model*", "lm_head*"]}  # no other update comes after those of the vision part
SHARED = {"device_adamw": True, "optimizer_backend": "native"}


def train(streams: SimulatedStreams | None, **settings: Any) -> list[Tensor]:
    """All masters after two steps, of which the first has images."""
    config = cases.tiny_config("qwen3_vl", num_hidden_layers=2)
    adamw = AdamWConfig(lr=1e-2, clip_grad=None)
    model = cases.plain_model(copy.deepcopy(config))
    engine = oracle.make_engine(model, config, adamw, streams=streams, cpu_threads=1, **settings)
    for step, images in enumerate((1, 0)):
        engine.zero_grad()
        batch = cases.pack(cases.rows("qwen3_vl", [images], seed=step))
        engine.forward_backward([batch], lambda m, scores: -scores.log_probs.sum() / 16)
        engine.optimizer_step()
    engine.forward([cases.pack(cases.rows("qwen3_vl", [1]))])  # the vision part is loaded again
    masters = [master.clone() for master in oracle.masters(engine).values()]
    engine.close()
    return masters


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(left, right, strict=True))


@pytest.mark.parametrize("settings", [ONLY_VISION, {**ONLY_VISION, **SHARED}], ids=str)
def test_a_gradient_of_zeros_waits_for_the_last_update(settings: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(device_adamw, "CHUNK_ELEMENTS", 512)
    expected, waits = train(None, **settings), set()
    for seed in range(ORDERS):
        streams = SimulatedStreams(seed)
        assert same_bits(train(streams, **settings), expected), f"order {seed}"
        waits |= streams.waits
    reasons = [reason for reason in waits if reason.endswith("before its next gradient")]
    assert reasons
    for reason in reasons:
        orders = (train(SimulatedStreams(seed, drop=reason), **settings) for seed in range(ORDERS))
        assert not all(same_bits(masters, expected) for masters in orders), reason

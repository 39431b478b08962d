"""LoRA in models that take images: all linear layers, those of encoder and projector too, equal peft's."""

import copy

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from tests import oracle
from tests.streaming.test_lora import LORA, copy_adapters, plain_lora
from tests.vision import cases


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next"])
def test_gradients_equal_peft_and_the_reference_is_the_base(family: str) -> None:
    config = cases.tiny_config(family)
    base = cases.plain_model(copy.deepcopy(config))
    engine = oracle.make_engine(base, config, AdamWConfig(lr=1e-2), lora=LORA, keep_reference=True)
    rows = cases.rows(family, [2, 1])
    batch = cases.pack(rows)

    def loss_and_gradients() -> dict[str, torch.Tensor]:
        engine.zero_grad()
        engine.forward_backward([batch], lambda index, outputs: -outputs.log_probs.sum() / 50)
        return oracle.engine_gradients(engine)

    (start,) = engine.forward([batch])
    loss_and_gradients()
    engine.optimizer_step()  # B is zero before it, and so are the gradients of A
    plain = plain_lora(copy.deepcopy(base), LORA)
    copy_adapters(engine, plain)
    found = loss_and_gradients()
    (-torch.cat([cases.plain_log_probs(plain, row) for row in rows]).sum() / 50).backward()
    parameters = plain.get_base_model().named_parameters()
    expected = {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
    assert found.keys() == expected.keys() and any("vis" in name for name in found)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    for name, grad in found.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-6 * norm, name
    with engine.reference_weights():
        (reference,) = engine.forward([batch])
    (trained,) = engine.forward([batch])
    assert torch.equal(reference.log_probs, start.log_probs)
    assert (trained.log_probs - start.log_probs).abs().max() > 1e-2
    engine.close()

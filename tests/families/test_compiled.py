"""Kinds of layers that torch.compile sees in no other test: experts with a recorded router, rows apart, windows."""

import pytest
import torch

from tests import oracle
from tests.families.configs import HYBRID, family_config

# torch 2.13 fails to fuse attention on a CPU where values are narrower than keys; such a layer runs as it is.
NOT_COMPILED = "DeepSeek-V3"


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-Next-80B-A3B", "GPT-OSS-20B", "DeepSeek-V3", "Gemma-2-9B"])
def test_compiled_layers_give_the_gradients_of_plain_ones(name, caplog):
    config = family_config(name, output_router_logits=True)
    model = oracle.plain_model(config)
    rows = [oracle.random_rows([12, 12, 12]), oracle.random_rows([5, 17])]
    gradients = []
    for compiled in (False, True):
        engine = oracle.make_engine(model, config, compile_layers=compiled)
        oracle.engine_pass(engine, [oracle.pack(each) for each in rows])
        gradients.append(oracle.engine_gradients(engine))
        engine.close()
    # Of linear attention as in the tests of training.
    tolerance = 1e-3 if name in HYBRID else 1e-5
    size = torch.cat([grad.flatten() for grad in gradients[0].values()]).norm()
    for parameter, grad in gradients[0].items():
        assert (gradients[1][parameter] - grad).norm() <= tolerance * grad.norm() + 1e-7 * size, parameter
    assert ("cannot be compiled" in caplog.text) == (name == NOT_COMPILED)

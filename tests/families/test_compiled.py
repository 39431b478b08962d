"""Kinds of layers that torch.compile sees in no other test: experts with a recorded router, rows apart, windows."""

import pytest
import torch

from tests import oracle
from tests.families.configs import family_config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-Next-80B-A3B", "GPT-OSS-20B", "DeepSeek-V3", "Gemma-2-9B"])
def test_compiled_layers_give_the_gradients_of_plain_ones(name):
    config = family_config(name, output_router_logits=True)
    model = oracle.plain_model(config)
    rows = [oracle.random_rows([12, 12, 12]), oracle.random_rows([5, 17])]
    gradients = []
    for compiled in (False, True):
        engine = oracle.make_engine(model, config, compile_layers=compiled)
        oracle.engine_pass(engine, [oracle.pack(each) for each in rows])
        gradients.append(oracle.engine_gradients(engine))
        engine.close()
    for parameter, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], grad, atol=1e-6, rtol=1e-3, msg=parameter)

"""Rows of one token have nothing to predict: they score 0, give no gradient and leave the other rows alone."""

import torch

from tests import oracle


def test_one_token_rows_change_nothing_for_the_others():
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    one, rows = oracle.random_rows([1, 1, 1]), oracle.random_rows([7, 12], seed=2)
    mixed = oracle.pack([one[0], rows[0], one[1], rows[1], one[2]])
    results = []
    for batches in ([oracle.pack(rows)], [mixed]):
        engine = oracle.make_engine(model, config)
        outputs = engine.forward_backward(batches, lambda index, scores: -scores.log_probs.sum())
        results.append((oracle.engine_log_probs(outputs, batches), oracle.engine_gradients(engine)))
        engine.close()
    (plain, expected), (scores, gradients) = results
    for row, found in zip(plain, (scores[1], scores[3]), strict=True):
        torch.testing.assert_close(found, row)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_token_rows_has_no_gradient():
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(oracle.plain_model(config), config)
    batch = oracle.pack(oracle.random_rows([1, 1]))
    (outputs,) = engine.forward_backward([batch], lambda index, scores: -scores.log_probs.sum())
    assert torch.equal(outputs.log_probs, torch.zeros(2))
    assert all(not gradient.any() for gradient in oracle.engine_gradients(engine).values())
    assert engine.optimizer_step() == 0.0
    engine.close()

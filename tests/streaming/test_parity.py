"""The engine against the plain transformers model and torch.optim.AdamW, float32 on CPU."""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.token_head import ScoredTokens, TokenHead
from tests import oracle

LENGTHS = [11, 24, 5, 17]
FAMILIES = [("qwen2", False), ("qwen2", True), ("llama", False), ("qwen3", True), ("mistral", False)]


def plain_step(model, optimizer, rows, clip, extra=None):
    """One plain step on the mean over all next tokens; returns loss, gradients before clipping, and their norm.

    `extra(model, rows)` is minimised with the loss, and is not in what is returned of it.
    """
    tokens = sum(len(row) - 1 for row in rows)
    optimizer.zero_grad()
    loss = -torch.cat([oracle.plain_log_probs(model, row)[0] for row in rows]).sum() / tokens
    (loss if extra is None else loss + extra(model, rows)).backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
    optimizer.step()
    return loss.item(), grads, norm


@pytest.mark.parametrize("family, tied", FAMILIES)
@pytest.mark.parametrize("size, interval", [(1, 1), (2, 2), (4, 3)])
def test_five_steps_equal_plain_adamw(family, tied, size, interval):
    config = oracle.tiny_config(family, tied=tied)
    # Where a gradient is rounding alone, AdamW without a larger eps makes whole steps of it.
    settings = AdamWConfig(lr=1e-4, weight_decay=1.0, eps=1e-6, decay_norms_and_biases=False)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, settings, checkpoint_interval=interval)
    optimizer = oracle.plain_adamw(model, settings)
    for step in range(5):
        rows = oracle.random_rows(LENGTHS, seed=step)
        loss, grads, norm = plain_step(model, optimizer, rows, settings.clip_grad)
        engine_loss = oracle.engine_pass(engine, oracle.split_micro_batches(rows, size))
        assert engine_loss == pytest.approx(loss, rel=1e-5)
        for name, grad in oracle.engine_gradients(engine).items():
            # Key norms and biases are sums that cancel almost wholly: their rounding is relative to the terms.
            assert (grad - grads[name]).norm() <= 1e-5 * grads[name].norm() + 1e-7 * norm, name
        assert engine.optimizer_step() == pytest.approx(norm, rel=1e-5)
    plain = dict(model.named_parameters())
    for name, weight in oracle.masters(engine).items():
        torch.testing.assert_close(weight, plain[name].detach(), atol=1e-5, rtol=1e-5)
    engine.close()


@pytest.mark.parametrize("tied", [False, True])
def test_padding_token_in_a_row_gets_the_gradient_of_transformers(tied):
    """Its embedding gets none, whether it pads or, as an end-of-turn token often does, stands in the text."""
    rows = oracle.random_rows(LENGTHS)
    config = oracle.tiny_config("llama", tied=tied, pad_token_id=int(rows[1][3]))
    settings = AdamWConfig(lr=1e-4)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, settings)
    _, grads, norm = plain_step(model, oracle.plain_adamw(model, settings), rows, settings.clip_grad)
    oracle.engine_pass(engine, oracle.split_micro_batches(rows, 2))
    embedding = oracle.engine_gradients(engine)["model.embed_tokens.weight"]
    torch.testing.assert_close(embedding, grads["model.embed_tokens.weight"], rtol=1e-5, atol=1e-6)
    assert engine.optimizer_step() == pytest.approx(norm, rel=1e-5)
    engine.close()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_packed_rows_do_not_see_each_other(family):
    config = oracle.tiny_config(family)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, forward_only=True)
    rows = oracle.random_rows([9, 14])
    batch = oracle.pack(rows)
    with torch.no_grad():
        for row, scores in zip(rows, oracle.engine_log_probs(engine.forward([batch]), [batch]), strict=True):
            torch.testing.assert_close(scores, oracle.plain_log_probs(model, row)[0], atol=1e-5, rtol=1e-5)
    engine.close()


def test_sliding_window_is_per_layer():
    config = oracle.tiny_config(
        "qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1
    )  # layer 0 attends to everything, the others to 4 tokens
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, forward_only=True)
    assert len(engine.plan.structures) == 2
    rows = oracle.random_rows([30, 12])
    batch = oracle.pack(rows)
    with torch.no_grad():
        for row, scores in zip(rows, oracle.engine_log_probs(engine.forward([batch]), [batch]), strict=True):
            torch.testing.assert_close(scores, oracle.plain_log_probs(model, row)[0], atol=1e-5, rtol=1e-5)
    engine.close()


def test_left_padded_rows_equal_unpadded_ones():
    from megatrain_verl.streaming.batch import MicroBatch

    config = oracle.tiny_config("llama")
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, forward_only=True)
    rows = oracle.random_rows([9, 14])
    ids, mask = torch.zeros(2, 20, dtype=torch.long), torch.zeros(2, 20, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, -len(row) :], mask[index, -len(row) :] = row, 1
    packed = oracle.engine_log_probs(engine.forward([oracle.pack(rows)]), [oracle.pack(rows)])
    padded_batch = MicroBatch.from_padded(ids, mask)
    padded = oracle.engine_log_probs(engine.forward([padded_batch]), [padded_batch])
    torch.testing.assert_close(padded, packed, atol=1e-6, rtol=0)
    # Positions are taken as given: other ones give other scores.
    shifted = MicroBatch.from_padded(ids, mask, position_ids=torch.arange(20).repeat(2, 1) * 2)
    other = oracle.engine_log_probs(engine.forward([shifted]), [shifted])
    assert max((a - b).abs().max() for a, b in zip(other, packed, strict=True)) > 0.01
    engine.close()


@pytest.mark.parametrize("temperature", [0.6, torch.tensor([0.6, 1.0, 1.7])])
def test_temperature_and_entropy_with_gradient(temperature):
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config)
    rows = oracle.random_rows([9, 14, 6])
    batch = oracle.pack(rows, temperature=temperature)
    temperatures = [0.6] * 3 if isinstance(temperature, float) else temperature.tolist()
    scored = [oracle.plain_log_probs(model, row, t) for row, t in zip(rows, temperatures, strict=True)]
    (-torch.cat([s[0] for s in scored]).sum() - 0.5 * torch.cat([s[1] for s in scored]).sum()).backward()

    def loss_fn(index, outputs):
        return -outputs.log_probs.sum() - 0.5 * outputs.entropy.sum()

    outputs = engine.forward_backward([batch], loss_fn, entropy=True, sum_pi_squared=True)
    for field, position in (("log_probs", 0), ("entropy", 1)):
        got = oracle.engine_log_probs(outputs, [batch], field)
        torch.testing.assert_close(got, [s[position].detach() for s in scored], atol=1e-5, rtol=1e-5)
    plain = dict(model.named_parameters())
    for name, grad in oracle.engine_gradients(engine).items():
        assert (grad - plain[name].grad).norm() <= 1e-5 * plain[name].grad.norm() + 1e-5, name
    logits = model(rows[0][None]).logits[0, :-1] / temperatures[0]
    squares = oracle.engine_log_probs(outputs, [batch], "sum_pi_squared")[0]
    torch.testing.assert_close(squares, logits.softmax(-1).square().sum(-1).detach(), atol=1e-5, rtol=1e-5)
    engine.close()


def test_gradient_is_the_token_mean_for_every_micro_batch_size():
    """80 and 12 tokens per row: a mean of micro-batch means would be wrong, and so would an undivided sum."""
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    rows = oracle.random_rows([12, 80, 40, 7])
    norms, flat = [], []
    for size in (1, 2, 4):
        engine = oracle.make_engine(model, config)
        oracle.engine_pass(engine, oracle.split_micro_batches(rows, size))
        flat.append(torch.cat([grad.flatten() for grad in oracle.engine_gradients(engine).values()]))
        norms.append(engine.optimizer_step())
        engine.close()
    for other in flat[1:]:
        assert (other - flat[0]).norm() < 1e-6 * flat[0].norm()
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def test_identical_micro_batches_give_the_norm_of_one_in_every_step():
    config = oracle.tiny_config("qwen2")
    model = oracle.plain_model(config)
    row = oracle.random_rows([20])[0]
    one = oracle.make_engine(model, config)
    several = oracle.make_engine(model, config)
    for count in (4, 4, 2):
        oracle.engine_pass(one, [oracle.pack([row])])
        oracle.engine_pass(several, [oracle.pack([row])] * count)
        assert several.optimizer_step() == pytest.approx(one.optimizer_step(), rel=1e-5)
    one.close()
    several.close()


def test_a_batch_without_labels_has_zero_gradient():
    config = oracle.tiny_config("qwen2")
    engine = oracle.make_engine(oracle.plain_model(config), config)
    batch = oracle.pack(oracle.random_rows([9]), score_mask=torch.zeros(9, dtype=torch.bool))
    outputs = engine.forward_backward([batch], lambda index, scores: -scores.log_probs.sum() / 1)
    assert outputs[0].log_probs.abs().sum() == 0
    assert engine.optimizer_step() == 0.0
    engine.close()


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("hottest, tolerance", [(1.0, 3e-6), (1.8, 1e-5)])
def test_head_gradient_with_temperatures_is_as_exact_for_few_tokens_as_for_many(tokens, keep, hottest, tolerance):
    """Of hidden states, norm weight and matrix, in float32 over a large vocabulary, against float64 autograd."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(49152, 64) + 0.5, 2 * torch.randn(tokens, 64)
    norm = Qwen2RMSNorm(64)
    head = TokenHead(norm, weight, 7)
    temperature, grad_log_probs = torch.linspace(1 / hottest, hottest, tokens), torch.arange(tokens) - 5.0  # one is 0
    scored = ScoredTokens(torch.arange(tokens), torch.arange(tokens) * 7, temperature)
    outputs, kept = head.score(hidden, scored, entropy=False, sum_pi_squared=False, keep=keep)
    assert (kept is not None) == keep
    found = torch.zeros(64), torch.zeros_like(weight)
    found = head.backward(hidden, scored, grad_log_probs, None, *found, kept), *found

    exact, matrix = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(norm.double()(exact) @ matrix.t() / temperature[:, None].double(), dim=1)
    log_probs = log_p.gather(1, scored.labels[:, None]).squeeze(1)
    torch.testing.assert_close(outputs.log_probs.double(), log_probs, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad((log_probs * grad_log_probs).sum(), [exact, norm.weight, matrix])
    for value, other in zip(found, expected, strict=True):
        assert (value - other).norm() <= tolerance * other.norm()

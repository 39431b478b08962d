"""AdamW ahead of the norm: the same bits as without, whatever follows."""

import math

import pytest
import torch

from megatrain_verl.config import AdamWConfig
from megatrain_verl.streaming.group.group import ALONE
from megatrain_verl.streaming.optimizer_step import AdamWStep
from megatrain_verl.streaming.speculation import Guess
from tests import oracle

LR = 1e-2


@pytest.fixture
def pair():
    """An engine that updates ahead and one that does not, for a clip value."""
    config = oracle.tiny_config("qwen2", layers=4)
    model = oracle.plain_model(config)
    engines = []

    def make(clip, **settings):
        adamw = AdamWConfig(lr=LR, clip_grad=clip)
        engines.append(oracle.make_engine(model, config, adamw, speculative_adamw_gb=1.0, **settings))
        engines.append(oracle.make_engine(model, config, adamw, **settings))
        return engines[-2:]

    yield make
    for engine in engines:
        engine.close()


def backward(engine, seed=0, next_lr=LR, scale=1.0, wait=True):
    """A pass; with `wait` every unit that may be updated ahead has been when it returns."""
    batches = oracle.split_micro_batches(oracle.random_rows([9, 14], seed=seed), 1)
    engine.zero_grad()
    engine.forward_backward(batches, lambda m, scores: -scale * scores.log_probs.sum() / 23, next_lr=next_lr)
    if wait:
        engine.streams.optimizer.record().synchronize()


def used_spares(engine):
    """Names of the units whose spare arenas have held a state."""
    return {unit.plan.name for unit in engine.state.units if unit.spare is not None and unit.spare.exp_avg.any()}


def assert_same_state(engine, control):
    expected = oracle.masters(control)
    assert all(torch.equal(weight, expected[name]) for name, weight in oracle.masters(engine).items())
    for mine, other in zip(engine.state.units, control.state.units, strict=True):
        assert torch.equal(mine.exp_avg, other.exp_avg) and torch.equal(mine.exp_avg_sq, other.exp_avg_sq)
    assert engine.step_count == control.step_count


@pytest.mark.parametrize("clip", [None, 1e9, 1e-3])
@pytest.mark.parametrize("wait", [True, False])
def test_steps_give_the_same_bits_with_and_without(pair, clip, wait):
    """With `wait` every unit is updated ahead, without only those whose turn comes before the norm is known."""
    engine, control = pair(clip)
    for step in range(4):
        for each in (engine, control):
            backward(each, seed=step, wait=wait)
        assert engine.optimizer_step(LR) == control.optimizer_step(LR)
    assert_same_state(engine, control)
    if wait:  # all but the embedding; with a tight clip only the first step was guessed, and dropped
        assert used_spares(engine) == {"head", "layers.0", "layers.1", "layers.2", "layers.3"}


def test_a_guess_that_fails_leaves_the_state_as_it_was(pair):
    """Clipped now and then, another learning rate, a NaN, more gradients, new weights: nothing of the guess stays."""
    engine, control = pair(30.0)
    for each in (engine, control):
        backward(each)
        each.optimizer_step(LR)
        backward(each, seed=1, scale=1e4)  # clipped
        each.optimizer_step(LR)
        backward(each, seed=2)  # not guessed after a clipped step
        each.optimizer_step(LR)
        backward(each, seed=3, next_lr=1.0)
        each.optimizer_step(LR)
        backward(each, seed=4, scale=float("nan"))
        assert math.isnan(each.optimizer_step(LR)) and each.step_count == 4
        backward(each, seed=5)
        each.load_weights(oracle.plain_model(each.model_config, seed=7).state_dict().items())
        each.optimizer_step(LR)
        backward(each, seed=6)
        backward(each, seed=7)
        each.forward_backward(
            [oracle.pack(oracle.random_rows([6]))], lambda m, scores: -scores.log_probs.sum(), next_lr=LR
        )
        each.optimizer_step(LR)
    assert_same_state(engine, control)


def test_the_reference_is_kept_before_an_update_ahead(pair):
    engine, control = pair(None, keep_reference=True)
    batches = [oracle.pack(oracle.random_rows([9]))]
    first = engine.forward(batches)[0].log_probs
    for step in range(3):
        for each in (engine, control):
            backward(each, seed=step)
            each.optimizer_step(LR)
    with engine.reference_weights():
        assert torch.equal(engine.forward(batches)[0].log_probs, first)
    assert used_spares(engine)
    assert_same_state(engine, control)


class Interrupted(Guess):
    """The process gets a signal while the ranks agree."""

    def close(self, limit=0):
        super().close(limit)
        if limit is None:
            raise KeyboardInterrupt


def test_an_interrupted_agreement_leaves_no_update_waiting():
    settings = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decay_norms_and_biases": True}
    guess = Interrupted(AdamWStep(lr=LR, step=1, grad_scale=1.0, **settings))
    with pytest.raises(KeyboardInterrupt):
        guess.agree(ALONE)
    assert guess._limit == 0 and not guess.begin(0)


def test_save_and_load_between_guess_and_step(pair, tmp_path):
    engine, control = pair(None)
    for each in (engine, control):
        backward(each)
        each.optimizer_step(LR)
    engine.save(tmp_path / "state")
    backward(engine, seed=1)
    engine.load(tmp_path / "state")
    for each in (engine, control):
        backward(each, seed=2)
        each.optimizer_step(LR)
    assert_same_state(engine, control)

"""Greedy samples of the streaming engine are those of transformers' `generate`."""

import copy

import pytest
import torch

from megatrain_verl.streaming.generation import greedy
from tests import oracle
from tests.vision import cases

PROMPTS = [[5, 6, 7], [1], [3, 9, 27, 81, 50, 60, 2, 44]]


@pytest.fixture(scope="module")
def plain():
    config = oracle.tiny_config("qwen2", max_position_embeddings=24)
    return config, oracle.plain_model(config)


def expected(model, prompt, tokens, **settings):
    """What transformers generates after `prompt`."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0, **settings}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


def test_greedy_equals_transformers_for_rows_of_any_length(plain):
    config, model = plain
    engine = oracle.make_engine(model, config)
    found = greedy(engine, PROMPTS, 10)
    assert found == [expected(model, prompt, 10) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) == 3  # the rows do not see each other
    # One pass per token, whatever the number of rows: layers cross once each, embedding and head too.
    assert engine.counters.h2d_bytes <= 10 * 4 * sum(unit.numel for unit in engine.plan.units)
    engine.close()


def test_a_row_ends_at_a_stop_token_or_the_longest_row(plain):
    config, model = plain
    engine = oracle.make_engine(model, config)
    stop = expected(model, PROMPTS[0], 10)[4]
    found = greedy(engine, PROMPTS, 40, [stop])
    for prompt, row in zip(PROMPTS, found, strict=True):
        whole = expected(model, prompt, 24 - len(prompt), eos_token_id=stop)
        assert row == whole and len(prompt) + len(row) <= 24
    assert found[0][-1] == stop and len(found[0]) < 10
    engine.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next"])
def test_rows_with_images_go_on_from_their_images(family):
    model = cases.plain_model(cases.tiny_config(family))
    engine = oracle.make_engine(model, copy.deepcopy(model.config))
    rows, stops = cases.rows(family, [1, 0, 2]), [cases.IMAGE_TOKEN, 91]
    found = greedy(engine, [row.ids.tolist() for row in rows], 4, stops, [row.images for row in rows])
    for row, new in zip(rows, found, strict=True):
        expected = []
        while len(expected) < 4 and not (expected and expected[-1] in stops):
            ids = torch.cat([row.ids, torch.tensor([*expected, 0], dtype=torch.int64)])
            expected.append(cases.plain_logits(model, cases.Row(ids, row.images))[-2].argmax().item())
        assert new == expected
    engine.close()

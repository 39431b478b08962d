"""What the engine does with images beside equalling plain transformers: freezing, positions, files, refusals."""

import copy
import fnmatch

import pytest
import torch
from transformers import AutoModelForImageTextToText

from megatrain_verl.streaming.checkpoint import export_pretrained
from megatrain_verl.streaming.device_plan import device_bytes
from megatrain_verl.streaming.image_positions import rope_positions
from tests import oracle
from tests.vision import cases

PARTS = {  # as docs/vision.md has them
    "qwen2_5_vl": [["*visual.blocks.*", "*visual.patch_embed.*"], ["*visual.merger.*"]],
    "qwen3_vl": [
        ["*visual.blocks.*", "*visual.patch_embed.*", "*visual.pos_embed.*"],
        ["*visual.merger.*", "*visual.deepstack_merger_list.*"],
    ],
    "llava_next": [["*vision_tower*"], ["*multi_modal_projector*", "*image_newline"]],
}


def engine_of(family, **settings):
    config = cases.tiny_config(family)
    model = cases.plain_model(copy.deepcopy(config))
    return model, oracle.make_engine(model, config, **settings)


def backward(engine, batch):
    engine.forward_backward([batch], lambda index, outputs: -outputs.log_probs.sum())
    return oracle.engine_gradients(engine)


@pytest.mark.parametrize("family", PARTS)
@pytest.mark.parametrize("part", [0, 1])
def test_a_frozen_part_has_no_gradient_and_the_others_have_theirs(family, part):
    row = cases.rows(family, [2])[0]
    model, engine = engine_of(family, freeze=PARTS[family][part])
    (-cases.plain_log_probs(model, row).sum()).backward()
    found = backward(engine, cases.pack([row]))
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    frozen, trained = (
        set().union(*(fnmatch.filter(expected, each) for each in PARTS[family][i])) for i in (part, 1 - part)
    )
    assert frozen and trained and found.keys() == expected.keys() - frozen
    for name, grad in found.items():
        assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-4, name
    engine.close()


def test_the_projector_can_be_trained_alone():
    rows = cases.rows("llava_next", [1, 2])
    model, engine = engine_of("llava_next", freeze=["*language_model*", "lm_head*", "*vision_tower*"])
    (-torch.cat([cases.plain_log_probs(model, row) for row in rows]).sum()).backward()
    found = backward(engine, cases.pack(rows))
    assert {name.split(".")[1] for name in found} == {"multi_modal_projector", "image_newline"}
    for name, grad in found.items():
        expected = model.get_parameter(name).grad
        assert (grad - expected).norm() <= 1e-5 * expected.norm(), name
    engine.close()


def test_the_main_merger_of_deepstack_can_be_trained_alone():
    """The features of the other mergers need no gradient then."""
    row = cases.rows("qwen3_vl", [2])[0]
    vision = [*PARTS["qwen3_vl"][0], "*deepstack_merger_list*"]
    model, engine = engine_of("qwen3_vl", freeze=[*vision, "*language_model*", "lm_head*"])
    (-cases.plain_log_probs(model, row).sum()).backward()
    found = backward(engine, cases.pack([row]))
    assert found and all(name.startswith("model.visual.merger.") for name in found)
    for name, grad in found.items():
        expected = model.get_parameter(name).grad
        assert (grad - expected).norm() <= 1e-5 * expected.norm(), name
    engine.close()


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])  # tied and untied
def test_planned_slots_and_accumulators_are_those_on_the_device(family):
    _, engine = engine_of(family, resident_layers=0)
    batch = cases.pack(cases.rows(family, [1]))
    parts = device_bytes(engine.plan, engine.config, batch.num_tokens, batch.num_tokens)
    backward(engine, batch)
    assert engine._ring.nbytes == parts["weight slots"]
    assert engine._gradients.device_bytes == parts["gradient accumulators"]
    engine.close()


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_router_loss_is_asked_for_in_the_text_config(family):
    config = cases.tiny_config(family, output_router_logits=True, router_aux_loss_coef=0.5)
    model = cases.plain_model(copy.deepcopy(config))
    row = cases.rows(family, [1])[0]
    types = (row.ids == cases.IMAGE_TOKEN).int()[None]
    output = model(input_ids=row.ids[None], **row.images, mm_token_type_ids=types, output_router_logits=True)
    engine = oracle.make_engine(model, config)
    engine.forward_backward([cases.pack([row])], lambda index, outputs: 0.0 * outputs.log_probs.sum())
    assert engine.router_loss.item() == pytest.approx(0.5 * output.aux_loss.item(), rel=1e-4)
    (0.5 * output.aux_loss).backward()
    for name, grad in oracle.engine_gradients(engine).items():
        if name.endswith("mlp.gate.weight"):
            expected = model.get_parameter(name).grad
            assert (grad - expected).norm() <= 1e-3 * expected.norm(), name
    engine.close()


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_in_parts_give_the_gradients_of_whole_layers(family):
    """The features that deepstack adds to a layer's output, and the encoder's gradient, stay what they were."""
    batch = cases.pack(cases.rows(family, [1, 0]))
    found = []
    for parts in (1, 2):
        _, engine = engine_of(family, expert_parts=parts)
        found.append(backward(engine, batch))
        engine.close()
    for name, grad in found[1].items():
        assert (grad - found[0][name]).norm() <= 1e-4 * found[0][name].norm() + 1e-7, name


def test_frozen_embedding_lets_the_encoder_learn():
    row = cases.rows("llava_next", [1])[0]
    model, engine = engine_of("llava_next", freeze=["*embed_tokens*"])
    (-cases.plain_log_probs(model, row).sum()).backward()
    name = "model.vision_tower.embeddings.patch_embedding.weight"
    expected = model.get_parameter(name).grad
    assert (backward(engine, cases.pack([row]))[name] - expected).norm() <= 1e-5 * expected.norm()
    engine.close()


def test_rows_of_text_only_leave_the_vision_part_without_gradient():
    model, engine = engine_of("qwen2_5_vl")
    batch = cases.pack(cases.rows("qwen2_5_vl", [0, 0]))
    assert batch.images is None
    for name, grad in backward(engine, batch).items():
        assert bool(grad.any()) != (".visual." in name), name
    engine.close()


@pytest.mark.parametrize("family", cases.CONFIGS)
def test_saved_folders_load_both_ways_and_another_image_gives_another_score(family, tmp_path):
    """The engine reads what transformers saved, transformers what the engine exports; bit for bit."""
    model, engine = engine_of(family, forward_only=True)
    model.save_pretrained(tmp_path / "saved")
    engine.load_weights(tmp_path / "saved")
    export_pretrained(tmp_path / "export", engine.named_weights(), model.config, 1 << 20)
    expected = model.state_dict()
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())

    batch = cases.pack(cases.rows(family, [1, 0]))
    before = oracle.engine_log_probs(engine.forward([batch]), [batch])
    batch.images["pixel_values"] = -batch.images["pixel_values"]
    after = oracle.engine_log_probs(engine.forward([batch]), [batch])
    assert not torch.allclose(before[0], after[0], atol=1e-3)
    # Not bit for bit: products of the experts are summed in another order when other tokens go to them.
    torch.testing.assert_close(before[1], after[1], atol=1e-6, rtol=1e-6)
    engine.close()


def test_given_positions_in_four_rows_are_used_as_they_are():
    _, engine = engine_of("qwen2_5_vl", forward_only=True)
    batch = cases.pack(cases.rows("qwen2_5_vl", [1, 2]))
    computed = oracle.engine_log_probs(engine.forward([batch]), [batch])
    batch.position_ids = rope_positions(batch, engine.plan.vision)
    assert batch.position_ids.shape == (4, batch.num_tokens)
    assert not torch.equal(batch.position_ids[2], batch.position_ids[3])
    torch.testing.assert_close(oracle.engine_log_probs(engine.forward([batch]), [batch]), computed)
    batch.position_ids[2] *= 2
    other = oracle.engine_log_probs(engine.forward([batch]), [batch])
    assert not torch.allclose(other[1], computed[1], atol=1e-3)
    engine.close()


def test_images_that_do_not_fit_are_refused_by_name():
    _, engine = engine_of("llava_next", forward_only=True)
    batch = cases.pack(cases.rows("llava_next", [1]))
    batch.input_ids[batch.input_ids == cases.IMAGE_TOKEN] = 1
    with pytest.raises(ValueError, match="0 image tokens .*features"):
        engine.forward([batch])
    batch.images["image_grid_thw"] = torch.ones(1, 3)
    with pytest.raises(ValueError, match="LlavaNextModel does not take image_grid_thw"):
        engine.forward([batch])
    engine.close()
    config = oracle.tiny_config("llama")
    text = oracle.make_engine(oracle.plain_model(config), config, forward_only=True)
    with pytest.raises(ValueError, match="the model takes text only"):
        text.forward([batch])
    text.close()

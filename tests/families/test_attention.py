"""What a layer may attend to, and what bends its scores, family by family."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from megatrain_verl.streaming import attention_kernels
from megatrain_verl.streaming.attention import MaskKind, RowLayout, _choose_kernel
from megatrain_verl.streaming.attention_kernels import Features
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.model_plan import plan_model
from tests import oracle
from tests.families.configs import family_config
from tests.families.test_training import check_three_steps

FULL, WINDOW, CHUNK = MaskKind(), MaskKind(window=6), MaskKind(chunk=7)


@pytest.mark.parametrize(
    "name, masks, structures",
    [
        ("Mistral-7B-v0.1", [WINDOW] * 3, 1),
        ("Qwen2 with window", [FULL, WINDOW, WINDOW], 2),
        ("Gemma-3-1B", [WINDOW, FULL, WINDOW], 2),
        ("GPT-OSS-20B", [WINDOW, FULL, WINDOW], 2),
        ("Llama-4-Scout", [CHUNK, CHUNK, CHUNK, FULL], 3),  # dense, experts, experts without rotary embedding
        ("Qwen3.5-27B", [FULL] * 4, 2),
        ("DeepSeek-V3", [FULL] * 3, 2),
    ],
)
def test_layers_share_a_template_only_if_they_behave_alike(name, masks, structures):
    plan = plan_model(family_config(name))
    assert plan.masks == masks
    assert len(plan.structures) == structures


def test_layers_of_equal_shapes_and_masks_are_not_alike_with_other_settings():
    """Two of these layers have experts and attend to everything: one with rotary embedding, the other without."""
    config = family_config("Llama-4-Scout", layer_types=["full_attention"] * 4)
    plan = plan_model(config)
    assert plan.masks == [FULL] * 4 and len(plan.structures) == 3
    check_three_steps("Llama-4-Scout", config, 3)


@pytest.mark.parametrize("name, feature", [("GPT-OSS-20B", "s_aux"), ("Gemma-2-9B", "softcap")])
def test_an_attention_implementation_that_would_drop_a_feature_is_refused(name, feature):
    config = family_config(name)
    with pytest.raises(ValueError, match=f"{feature}, which attn_implementation=sdpa does not compute"):
        oracle.make_engine(oracle.plain_model(config), config, attn_implementation="sdpa")


def test_attention_to_later_tokens_is_refused():
    with pytest.raises(ValueError, match="not causal"):
        plan_model(family_config("Gemma-3-1B", use_bidirectional_attention=True))


@pytest.mark.parametrize("name", ["Gemma-3-1B", "GPT-OSS-20B", "Qwen3.5-27B", "Llama-4-Scout"])
def test_left_padded_rows_equal_unpadded_ones(name):
    config = family_config(name)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, forward_only=True)
    rows = oracle.random_rows([9, 14])
    ids, mask = torch.zeros(2, 20, dtype=torch.long), torch.zeros(2, 20, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, -len(row) :], mask[index, -len(row) :] = row, 1
    batch = MicroBatch.from_padded(ids, mask)
    for row, scores in zip(rows, oracle.engine_log_probs(engine.forward([batch]), [batch]), strict=True):
        torch.testing.assert_close(scores, oracle.plain_log_probs(model, row)[0].detach(), atol=1e-5, rtol=1e-5)
    engine.close()


@pytest.mark.parametrize("name", ["Gemma-3-1B", "GLM-4-9B", "DeepSeek-V3", "GPT-OSS-20B", "Qwen3.5-27B"])
def test_given_positions_are_used(name):
    """Positions with gaps, which a shift as that of padding is not: rotary embeddings see distances alone."""
    config = family_config(name)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, forward_only=True)
    rows = oracle.random_rows([9, 14])
    positions = [3 * torch.arange(len(row)) + 2 for row in rows]
    batch = replace(oracle.pack(rows), position_ids=torch.cat(positions))
    scores = oracle.engine_log_probs(engine.forward([batch]), [batch])
    for row, places, found in zip(rows, positions, scores, strict=True):
        everything = torch.ones(1, len(row), dtype=torch.long)  # else transformers takes gaps for the ends of rows
        logits = model(row[None], position_ids=places[None], attention_mask=everything).logits[0, :-1]
        expected = torch.log_softmax(logits, dim=-1).gather(1, row[1:, None])[:, 0].detach()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    engine.close()


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Llama-4-Scout"])
def test_short_rows_beside_a_long_one_equal_rows_alone(name):
    """Of a batch of these rows more than half would be padding: linear attention gets them one by one."""
    config = family_config(name)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, forward_only=True)
    rows = oracle.random_rows([5, 40, 3, 4, 6])
    batch = oracle.pack(rows)
    for row, scores in zip(rows, oracle.engine_log_probs(engine.forward([batch]), [batch]), strict=True):
        torch.testing.assert_close(scores, oracle.plain_log_probs(model, row)[0].detach(), atol=1e-5, rtol=1e-5)
    engine.close()


def test_dynamic_rotary_frequencies_do_not_depend_on_the_rows_before():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = family_config("Llama-2-7B", rope_parameters=rope, max_position_embeddings=16)
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config, forward_only=True, max_seq_len=64)
    rows = oracle.random_rows([40, 9, 25])
    batch = oracle.pack(rows)
    for row, scores in zip(rows, oracle.engine_log_probs(engine.forward([batch]), [batch]), strict=True):
        fresh = oracle.plain_model(config)  # transformers keeps the frequencies of the longest row so far
        torch.testing.assert_close(scores, oracle.plain_log_probs(fresh, row)[0].detach(), atol=1e-5, rtol=1e-5)
    engine.close()


def test_soft_capped_logits_with_temperature_and_entropy():
    """Logits are bent before they are divided by the temperature; both gradients pass through the bend."""
    config = family_config("Gemma-2-9B")
    model = oracle.plain_model(config)
    engine = oracle.make_engine(model, config)
    rows, temperature = oracle.random_rows([9, 14]), 0.6
    batch = oracle.pack(rows, temperature=temperature)
    scored = [oracle.plain_log_probs(model, row, temperature) for row in rows]
    (-torch.cat([s[0] for s in scored]).sum() - 0.5 * torch.cat([s[1] for s in scored]).sum()).backward()
    outputs = engine.forward_backward(
        [batch], lambda index, scores: -scores.log_probs.sum() - 0.5 * scores.entropy.sum(), entropy=True
    )
    for field, position in (("log_probs", 0), ("entropy", 1)):
        got = oracle.engine_log_probs(outputs, [batch], field)
        torch.testing.assert_close(got, [s[position].detach() for s in scored], atol=1e-5, rtol=1e-5)
    for name, grad in oracle.engine_gradients(engine).items():
        expected = model.get_parameter(name).grad
        assert (grad - expected).norm() <= 1e-5 * expected.norm() + 1e-5, name
    logits = model(rows[0][None]).logits
    assert logits.abs().max() < 3.0 and logits.abs().max() > 2.0  # the cap of 3 is felt
    engine.close()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_attention_equals_attention_step_by_step(window, softcap, sinks):
    torch.manual_seed(0)
    rows = RowLayout.of([5, 17, 9], "auto", "cpu")
    query, key, value = torch.randn(1, 4, 31, 8), torch.randn(1, 2, 31, 8), torch.randn(1, 2, 31, 8)
    features = Features(0.5, softcap=softcap, s_aux=torch.randn(4) if sinks else None)
    mask = MaskKind(window=window).over(rows)
    flex = attention_kernels.flex_attention(query, key, value, mask, features)
    parts = zip(*(tensor.split(rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    eager = [attention_kernels.eager(*part, window, features).transpose(1, 2) for part in parts]
    torch.testing.assert_close(flex, torch.cat(eager, dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("compiler")
def test_compiled_flex_attention_equals_attention_step_by_step(monkeypatch):
    """inductor takes the functions of mask and score as on CUDA, where it puts them into kernels of its own."""
    monkeypatch.setattr(attention_kernels, "COMPILED_ON", ("cpu",))
    torch.manual_seed(0)
    rows = RowLayout.of([5, 17, 9], "auto", "cpu")
    query, key, value = torch.randn(1, 4, 31, 16), torch.randn(1, 2, 31, 16), torch.randn(1, 2, 31, 16)
    features, mask = Features(0.5, softcap=2.0), MaskKind(window=6).over(rows)
    mask.image_blocks = torch.tensor([-1] * 8 + [0] * 9 + [-1] * 5 + [1] * 9)
    with torch.no_grad():  # torch has no backward pass of flex attention on a CPU
        flex = attention_kernels.flex_attention(query, key, value, mask, features)
    split = (tensor.split(rows.lengths, dim=2) for tensor in (query, key, value))
    parts = zip(*split, mask.image_blocks.split(rows.lengths), strict=True)
    eager = [attention_kernels.eager(*part, 6, features, block).transpose(1, 2) for *part, block in parts]
    torch.testing.assert_close(flex, torch.cat(eager, dim=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "head, softcap, kernel",
    [
        (256, None, "varlen"),
        (80, None, "varlen"),
        (100, None, "sdpa"),  # no multiple of 8
        (512, None, "sdpa"),
        (256, 2.0, "flex_attention"),
        (512, 2.0, "eager"),
        (8, 2.0, "eager"),
    ],
)
def test_heads_that_no_cuda_kernel_takes_are_computed_step_by_step(head, softcap, kernel, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # without the flash-attn package
    query = torch.empty(1, 4, 31, head, dtype=torch.bfloat16, device="meta")  # stands for CUDA
    mask = MaskKind().over(RowLayout.of([5, 17, 9], "auto", "cpu"))
    assert _choose_kernel(query, mask, Features(0.5, softcap=softcap)) == kernel

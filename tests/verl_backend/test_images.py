"""RL steps on rows with images, whose `multi_modal_inputs` are what verl's agent loop makes of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from transformers import AutoModelForImageTextToText
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig

from megatrain_verl.verl_backend.micro_batches import row_images
from tests.verl_backend.cases import TEMPERATURE, _byte_tokenizer, actor_loss, jagged, rl_batch, score, train, weights
from tests.vision import cases as vision

COUNTS = [1, 0, 2, 1]
FAMILIES = ["qwen2_5_vl", "llava_next"]


def save_model(folder: Path, family: str) -> HFModelConfig:
    tokenizer = _byte_tokenizer()
    tokenizer.save_pretrained(folder)
    vision.plain_model(vision.tiny_config(family, vocab_size=len(tokenizer))).save_pretrained(folder)
    return HFModelConfig(path=str(folder))


def image_batch(model: HFModelConfig, family: str) -> TensorDict:
    """Rows whose prompts hold the images and whose responses are their last three tokens."""
    rows = vision.rows(family, COUNTS)
    text = rl_batch(vision.TEXT_VOCAB, rows=len(rows))
    batch = {
        "input_ids": jagged([row.ids for row in rows]),
        "position_ids": position_ids(model, rows),
        "prompts": jagged([row.ids[:-3] for row in rows]),
        "responses": jagged([row.ids[-3:] for row in rows]),
    }
    generator = torch.Generator().manual_seed(5)
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        batch[name] = jagged([torch.randn(3, generator=generator) for _ in rows])
    for name in ("response_mask", "loss_mask"):
        batch[name] = jagged([torch.ones(3, dtype=torch.int64) for _ in rows])
    for name, value in batch.items():
        text[name] = value
    inputs = [{**(row.images or {}), **lengths(row)} for row in rows]
    text["multi_modal_inputs"] = torch.stack([NonTensorData(each) for each in inputs])
    tu.assign_non_tensor(text, micro_batch_size_per_gpu=2)
    return text


def lengths(row: vision.Row) -> dict[str, torch.Tensor]:
    """What verl's agent loop adds for models with grids."""
    grid = (row.images or {}).get("image_grid_thw")
    return {} if grid is None else {"images_seqlens": grid[:, 1] * grid[:, 2]}


def position_ids(model: HFModelConfig, rows: list[vision.Row]) -> torch.Tensor:
    """(4, L) per row of a model with M-RoPE as in `_compute_position_ids` of verl's agent loop, else (L,)."""
    with torch.device("meta"):
        base = AutoModelForImageTextToText.from_config(model.hf_config, attn_implementation="eager").model
    if not hasattr(base, "get_rope_index"):
        return jagged([torch.arange(len(row.ids)) for row in rows])
    positions = []
    for row in rows:
        grids = {"image_grid_thw": (row.images or {}).get("image_grid_thw")}
        types = (row.ids == vision.IMAGE_TOKEN).int()[None]
        rotary, _ = base.get_rope_index(input_ids=row.ids[None], mm_token_type_ids=types, **grids)
        positions.append(torch.cat([torch.arange(len(row.ids))[None], rotary[:, 0]]))
    return tu.nested_tensor_from_tensor_list(positions)


def plain_step(model: HFModelConfig, rows: list[vision.Row], batch: TensorDict) -> tuple[float, float]:
    """Loss and gradient norm of the plain transformers model: verl's own loss on the log-probs of its own forward.

    verl's FSDP engine runs Qwen's models with images on flash-attn only.
    """
    plain = AutoModelForImageTextToText.from_pretrained(model.path, attn_implementation="eager")
    losses = []
    for first in range(0, len(rows), 2):
        part = tu.index_select_tensor_dict(batch, [first, first + 1])
        tu.assign_non_tensor(part, dp_size=1, batch_num_tokens=3 * len(rows))
        scores = [vision.plain_log_probs(plain, row, TEMPERATURE) for row in rows[first : first + 2]]
        output = {"log_probs": jagged([torch.cat([score, score.new_zeros(1)]) for score in scores])}
        losses.append(actor_loss()(model_output=output, data=part, dp_group=None)[0])
    sum(losses).backward()
    return sum(losses).item(), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_first_step_on_rows_with_images_equals_plain_transformers(tmp_path: Path, make: Callable, family: str) -> None:
    model = save_model(tmp_path, family)
    batch = image_batch(model, family)
    loss, norm = plain_step(model, vision.rows(family, COUNTS), batch)
    engine = make(model)
    before = weights(engine)
    found = train(engine, batch, actor_loss())
    assert sum(found["loss"]) == pytest.approx(loss, rel=1e-5)
    assert found["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    moved = {name for name, weight in weights(engine).items() if not torch.equal(weight, before[name])}
    assert {name for name in before if "vision_tower" in name and "layers.0" in name or ".blocks." in name} <= moved
    assert {name for name in before if "projector" in name or "merger" in name} <= moved


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_gives_other_scores(tmp_path: Path, make: Callable, family: str) -> None:
    model = save_model(tmp_path, family)
    batch = image_batch(model, family)
    engine = make(model)
    before = score(engine, batch)["log_probs"].unbind()
    other = batch.clone()
    inputs = [row_images(each) or {} for each in batch["multi_modal_inputs"]]
    inputs[2]["pixel_values"] = -inputs[2]["pixel_values"]
    other["multi_modal_inputs"] = torch.stack([NonTensorData(each) for each in inputs])
    after = score(engine, other)["log_probs"].unbind()
    changed = [not torch.equal(left[:-1], right[:-1]) for left, right in zip(before, after, strict=True)]
    assert changed == [False, False, True, False]


def test_video_is_refused() -> None:
    with pytest.raises(ValueError, match="no video or audio.*pixel_values_videos"):
        row_images({"pixel_values_videos": torch.zeros(1), "video_grid_thw": torch.zeros(1, 3)})

"""SFT on rows with images: what is encoded, what is dropped, and a run as a user starts it."""

import json
import os
import subprocess
import sys

import draw_shapes
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatrain_verl.sft.dataset import ChatDataset
from megatrain_verl.sft.images import open_images
from tests.sft.cases import data_config
from tests.vision import processors

SHAPES = OmegaConf.create({"names": ["shapes"], "part": "train"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    draw_shapes.write(folder / "data", 16)
    return folder


@pytest.fixture(scope="module")
def processor():
    return processors.make("llava_next")


def dataset(processor, data, **options):
    return ChatDataset(SHAPES, processor.tokenizer, data_config(data, **options), processor)


@pytest.mark.parametrize("family", processors.TOKENS)
def test_a_row_is_what_the_processor_makes_of_it(folder, family):
    """Tokens and pixels are the processor's; trained is the answer with its end-of-turn token."""
    processor = processors.make(family)
    row = dataset(processor, folder / "data")[3]
    source = json.loads((folder / "data" / "shapes.json").read_text())[3]
    answer, shown = source["messages"][1]["content"], processors.SHOWN[family]
    text = f"<|im_start|>user\n{shown}What is it?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    image = open_images([{"bytes": None, "path": str(folder / "data" / source["images"][0])}])
    expected = processor(text=[text], images=image, return_tensors="pt")
    assert torch.equal(row["input_ids"], expected["input_ids"][0])
    tensors = {"llava_next": {"image_sizes"}, "gemma3": set()}.get(family, {"image_grid_thw"})
    assert row["multi_modal_inputs"].keys() == {"pixel_values", *tensors}
    for name, value in row["multi_modal_inputs"].items():
        assert torch.equal(value, expected[name])
    assert processor.tokenizer.decode(row["input_ids"][row["loss_mask"].bool()]) == f"{answer}<|im_end|>"


def test_a_pack_has_the_images_of_its_rows(folder, processor):
    packed = dataset(processor, folder / "data", packing=True, max_token_len_per_gpu=600)
    item = packed[0]
    rows = int((item["position_ids"] == 0).sum())
    assert rows == len(packed.packs[0]) > 1
    assert len(item["multi_modal_inputs"]["image_sizes"]) == rows
    tokens = (item["input_ids"] == processor.image_token_id).sum()
    single = dataset(processor, folder / "data")
    assert tokens == sum((single[row]["input_ids"] == processor.image_token_id).sum() for row in packed.packs[0])


def test_rows_whose_images_do_not_fit_are_dropped_with_the_reason(folder, processor, tmp_path, capsys):
    rows = json.loads((folder / "data" / "shapes.json").read_text())
    for row in rows:
        row["images"] = [str(folder / "data" / row["images"][0])]
    rows[1]["messages"][0]["content"] = "What is it?"
    rows[2]["images"] = []
    write(tmp_path, rows)
    assert len(dataset(processor, tmp_path)) == len(rows) - 2
    printed = capsys.readouterr().out
    assert "1 dropped: its messages have 0 <image> for 1 images (first: row 2)" in printed
    assert "1 dropped: its messages have 1 <image> for 0 images (first: row 3)" in printed
    with pytest.raises(ValueError, match="its images reach beyond data.max_length=40 tokens"):
        dataset(processor, tmp_path, max_length=40, truncation="right")


def test_what_is_no_image_is_named_with_its_row(folder, processor, tmp_path):
    rows = json.loads((folder / "data" / "shapes.json").read_text())[:2]
    rows[1]["images"] = ["none.png"]
    write(tmp_path, rows[1:])
    with pytest.raises(ValueError, match=r"row 1: image .*none.png does not exist"):
        dataset(processor, tmp_path)
    (tmp_path / "none.png").write_text("text")
    with pytest.raises(ValueError, match=r"row 1: image .*none.png cannot be read"):
        dataset(processor, tmp_path)


def test_a_text_model_refuses_images(folder, processor):
    with pytest.raises(ValueError, match="data set shapes has images, but there is no image processor"):
        ChatDataset(SHAPES, processor.tokenizer, data_config(folder / "data"), None)


def write(folder, rows):
    (folder / "shapes.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"shapes": draw_shapes.ENTRY}))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llava_next", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_run_trains_encoder_projector_and_language_model(folder, tmp_path, family):
    """Eight steps on drawn shapes: the loss falls, and the exported model has other weights in every part."""
    processors.save(family, tmp_path / "model")
    options = [
        "model.path=model",
        f"data.dataset_dir={folder / 'data'}",
        "data.dataset=shapes",
        "data.train_batch_size=8",
        "data.max_length=256",
        "data.max_token_len_per_gpu=512",
        "engine.dtype=float32",
        "engine.optimizer_backend=torch",
        "engine.cpu_threads=1",
        "optim.lr=2e-3",
        "trainer.total_training_steps=8",
        "trainer.default_local_dir=out",
    ]
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VERL_FILE_LOGGER_PATH"}
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "megatrain_verl.sft", *options]
    run = subprocess.run(command, env=environment, cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["data"]["train/loss"] for line in lines if "train/loss" in line["data"]]
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0]
    exported = tmp_path / "out" / "global_step_8" / "huggingface"
    before, after = (
        AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (tmp_path / "model", exported)
    )
    assert AutoProcessor.from_pretrained(exported).image_token == processors.TOKENS[family]["image_token"]
    for part in ("vision_tower.encoder.layers.0", "multi_modal_projector", "language_model.layers.1"):
        names = [name for name in before if part in name]
        assert names and not any(torch.equal(before[name], after[name]) for name in names), part

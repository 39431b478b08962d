"""Prompt files with images are refused, with the row, where verl would train on other prompts or end later."""

from pathlib import Path

import draw_shapes
import pandas
import pytest
from transformers import ProcessorMixin
from verl.workers.config import HFModelConfig

from megatrain_verl.verl_backend import prompt_files
from tests.verl_backend.run_configs import run_config
from tests.vision import processors


@pytest.fixture(scope="module")
def processor() -> ProcessorMixin:
    return processors.make("qwen2_5_vl")


@pytest.fixture
def prompts(tmp_path: Path) -> pandas.DataFrame:
    draw_shapes.write(tmp_path, 8)
    return pandas.read_parquet(tmp_path / "prompts.parquet")


def check(tiny: HFModelConfig, folder: Path, prompts: pandas.DataFrame, processor: ProcessorMixin) -> None:
    for name in ("train", "test"):
        prompts.to_parquet(folder / f"{name}.parquet")
    data = run_config(tiny, folder, "model_engine=megatrain").data
    prompt_files.check(data, processor.tokenizer, processor)


def test_the_package_by_which_verl_reads_images_is_named(
    tiny: HFModelConfig,
    tmp_path: Path,
    prompts: pandas.DataFrame,
    processor: ProcessorMixin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_files, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="data.train_files = .*has images in column images .*install qwen-vl-utils"):
        check(tiny, tmp_path, prompts, processor)


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is taken for installed: these rows are refused before verl needs it."""
    monkeypatch.setattr(prompt_files, "find_spec", lambda name: object())


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize(
    ("question", "count", "message"),
    [
        ("<image>Is it <image>?", 1, "row 5: its messages have 2 <image> for 1 images"),
        ("What is it?", 1, "row 5: its messages have 0 <image> for 1 images"),
        ("<image>What is it?", 0, "row 5: its messages have 1 <image> for 0 images"),
    ],
)
def test_messages_show_every_image_once(
    tiny: HFModelConfig,
    tmp_path: Path,
    prompts: pandas.DataFrame,
    processor: ProcessorMixin,
    question: str,
    count: int,
    message: str,
) -> None:
    prompts.at[5, "prompt"] = [{"role": "user", "content": question}]
    prompts.at[5, "images"] = list(prompts.at[5, "images"])[:count]
    with pytest.raises(ValueError, match=message):
        check(tiny, tmp_path, prompts, processor)


@pytest.mark.usefixtures("readable")
def test_an_image_that_is_none_is_named_with_its_row(
    tiny: HFModelConfig, tmp_path: Path, prompts: pandas.DataFrame, processor: ProcessorMixin
) -> None:
    for row in set(range(8)) - {3}:  # with images, these would need the package
        prompts.at[row, "prompt"], prompts.at[row, "images"] = [{"role": "user", "content": "What is it?"}], []
    prompts.at[3, "images"] = [{"bytes": b"no image"}]
    with pytest.raises(ValueError, match="row 3: cannot read its images: cannot identify image file"):
        check(tiny, tmp_path, prompts, processor)


def test_the_drawn_prompts_have_the_drawn_images(tmp_path: Path, prompts: pandas.DataFrame) -> None:
    for row in prompts.itertuples():
        file = tmp_path / "images" / f"{row.Index}.png"
        (image,) = row.images
        assert image["bytes"] == file.read_bytes()
        answer = row.reward_model["ground_truth"]
        scores = [draw_shapes.compute_score("shapes", text, answer) for text in (f"a {answer}", answer.split()[0], "?")]
        assert scores == [1, 0.5, 0]

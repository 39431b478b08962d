"""Draw a small data set of images with questions, to try SFT and GRPO on images: one coloured shape each.

    python examples/draw_shapes.py data/shapes --rows 200

writes for SFT images, `shapes.json` (sharegpt rows with an `images` column) and `dataset_info.json` that describes it,
and for GRPO `prompts.parquet`, verl's prompts with the same images in them, for which this file has the reward.
"""

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image, ImageDraw

COLOURS = {"red": "#d62728", "green": "#2ca02c", "blue": "#1f77b4", "yellow": "#ffd700"}
SHAPES = ("circle", "square", "triangle")
SIZES = ((64, 48), (48, 64), (64, 64))
ENTRY = {
    "file_name": "shapes.json",
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}


def draw(colour: str, shape: str, size: tuple[int, int], generator: random.Random) -> Image.Image:
    """A white image of `size` with one shape somewhere in it."""
    image = Image.new("RGB", size, "white")
    width = generator.randint(16, 28)
    left, top = (generator.randint(2, side - width - 2) for side in size)
    right, bottom = left + width, top + width
    pen = ImageDraw.Draw(image)
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=COLOURS[colour])
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=COLOURS[colour])
    else:
        pen.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=COLOURS[colour])
    return image


def write(folder: Path, rows: int, seed: int = 0) -> None:
    """The data set of `rows` rows in `folder`."""
    generator = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    data, prompts = [], []
    for number in range(rows):
        colour, shape = generator.choice(list(COLOURS)), generator.choice(SHAPES)
        path = f"images/{number}.png"
        image = draw(colour, shape, generator.choice(SIZES), generator)
        image.save(folder / path)
        turns = [("user", "<image>What is it?"), ("assistant", f"a {colour} {shape}")]
        messages = [{"role": role, "content": text} for role, text in turns]
        data.append({"messages": messages, "images": [path]})
        prompts.append(prompt(image, messages[0], f"{colour} {shape}", number))
    (folder / "shapes.json").write_text(json.dumps(data, indent=1))
    (folder / "dataset_info.json").write_text(json.dumps({"shapes": ENTRY}, indent=1))
    pd.DataFrame(prompts).to_parquet(folder / "prompts.parquet")


def prompt(image: Image.Image, question: dict[str, str], answer: str, number: int) -> dict[str, Any]:
    """The row of verl's prompt file that asks `question`, a message with one `<image>`, about `image`."""
    file = io.BytesIO()
    image.save(file, "png")
    return {
        "data_source": "shapes",
        "prompt": [question],
        "images": [{"bytes": file.getvalue()}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": number},
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None, **kwargs: object
) -> float:
    """verl's reward: half a point each for the colour and the shape in the answer."""
    words = ground_truth.split()
    return sum(word in solution_str for word in words) / len(words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw a data set of coloured shapes with questions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    given = parser.parse_args()
    if given.rows < 1:
        parser.error(f"--rows must be 1 or more, got {given.rows}")
    write(given.folder, given.rows)
    print(f"{given.rows} rows in {given.folder}")

"""Images of a row: where they are and how they are read. `<image>` in a message marks the place of the next one."""

import io
from pathlib import Path
from typing import Any

import datasets
from PIL import Image, UnidentifiedImageError

MARK = "<image>"  # LLaMA-Factory's
ImageSource = dict[str, Any]  # "bytes" of an image file, or None and its "path"
FEATURE = datasets.List({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})


def find_images(given: Any, folder: Path) -> list[ImageSource]:
    """The images of a row: paths in `folder`, dicts of "bytes" and "path" (Parquet), or decoded images (hub).

    Raises:
        ValueError: something else, or a file that does not exist.
    """
    if given is None:
        return []
    return [_source(image, folder) for image in (given if isinstance(given, list) else [given])]


def open_images(sources: list[ImageSource]) -> list[Image.Image]:
    """The images in RGB.

    Raises:
        ValueError: names a file that is no image.
    """
    return [_open(source) for source in sources]


def _source(image: Any, folder: Path) -> ImageSource:
    if isinstance(image, str):
        path = folder / image
        if not path.is_file():
            raise ValueError(f"image {path} does not exist")
        return {"bytes": None, "path": str(path)}
    if isinstance(image, dict) and image.get("bytes"):
        return {"bytes": image["bytes"], "path": None}
    if isinstance(image, dict) and isinstance(image.get("path"), str):
        return _source(image["path"], folder)
    if isinstance(image, Image.Image):
        file = io.BytesIO()
        image.save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}
    raise ValueError(f"an image must be a path, or the bytes of a file, got {type(image).__name__}")


def _open(source: ImageSource) -> Image.Image:
    try:
        with Image.open(source["path"] or io.BytesIO(source["bytes"])) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"image {source['path'] or 'in the row'} cannot be read: {error}") from error

"""A processor that cannot be used is named."""

import logging
from pathlib import Path

import pytest

from megatrain_verl.verl_backend.processors import load_processor
from tests.vision import cases


def test_a_damaged_processor_is_logged_with_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = cases.tiny_config("llava_next")
    config.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text("{")
    (tmp_path / "preprocessor_config.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert load_processor(str(tmp_path), config) is None
    assert f"the processor of images in {tmp_path} cannot be used: " in caplog.text

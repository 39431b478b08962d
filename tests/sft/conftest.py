"""verl on the CPU platform, chosen before anything imports verl."""

import os

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")
pytest.importorskip("verl")

import megatrain_verl.verl_backend.plugin  # noqa: E402, F401

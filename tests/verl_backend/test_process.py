"""What importing the package does to a process: environment, threads, and a plug-in that fails."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from megatrain_verl.verl_backend import process_env


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh process, as verl and Ray start them."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "VERL_PLATFORM": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_options_of_a_worker_allow_concurrent_streams() -> None:
    """verl's workers import the options before CUDA starts; a process that uses another backend is left alone."""
    code = "import verl, os; print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))\n"
    code += "import megatrain_verl.verl_backend.config; print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"
    assert run(code, CUDA_DEVICE_MAX_CONNECTIONS="1").stdout.split()[-2:] == ["1", "32"]
    assert run(code, CUDA_DEVICE_MAX_CONNECTIONS="8").stdout.split()[-2:] == ["8", "8"]


def test_a_late_import_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with caplog.at_level(logging.WARNING):
        process_env.allow_concurrent_streams()
    assert "Unset it in the shell that starts Ray" in caplog.text and "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ


def test_cores_are_used_whatever_ray_sets() -> None:
    code = "import torch, os; before = torch.get_num_threads()\n"
    code += "from megatrain_verl.verl_backend.process_env import use_cores\n"
    code += "use_cores(3); print(before, torch.get_num_threads())"
    assert run(code, OMP_NUM_THREADS="1").stdout.split() == ["1", "3"]


def test_a_failed_plugin_is_logged_and_raised_where_the_engine_is_asked_for() -> None:
    """verl swallows the exception of a plug-in; without this the error would be "Unknown backend: megatrain"."""
    code = """
import verl_patches
def refuse():
    raise RuntimeError("verl_patches.some_patch was written for verl 0.9.1")
verl_patches.apply_all = refuse
import verl
import megatrain_verl.verl_backend.config
"""
    failed = run(code)
    assert failed.returncode != 0
    assert "ERROR" in failed.stderr and "cannot be used in this process: verl_patches.some_patch" in failed.stderr
    assert failed.stderr.rstrip().splitlines()[-1] == (
        "RuntimeError: the verl plug-in of megatrain_verl failed in this process: "
        "verl_patches.some_patch was written for verl 0.9.1"
    )

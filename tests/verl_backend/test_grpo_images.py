"""Real GRPO on images: prompts drawn by the example, vLLM sees them, the engine trains encoder and projector."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import draw_shapes
import pandas
import pytest
from transformers import AutoModelForImageTextToText

from tests.verl_backend.test_grpo import ACTOR, ROLLOUT, ROOT, train
from tests.vision import cases, processors, rollout_model, torchvision_python

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(character in ground_truth for character in solution_str) / max(1, len(solution_str))
"""
STEPS = 3
MOST_DIFFERENCE = 1e-5  # of a token's probability in the rollout and in the trainer, both float32


@pytest.fixture(scope="module")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the packages by which Qwen's processors and verl read images."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if not (find_spec("torchvision") and find_spec("qwen_vl_utils")):
        folder = tmp_path_factory.mktemp("packages")
        try:
            torchvision_python.install(folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"torchvision and qwen-vl-utils cannot be installed: {error.stderr[-300:]}")
        path.append(str(folder))
    return os.pathsep.join(path)


def make_inputs(folder: Path, family: str, python_path: str) -> None:
    """A model, 16 prompts with one question of which every fourth has no image, and a reward."""
    command = [sys.executable, "-m", "tests.vision.rollout_model", str(folder / "model"), family]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": python_path}, timeout=200)
    draw_shapes.write(folder, 16)
    prompts = pandas.read_parquet(folder / "prompts.parquet")
    for row in range(0, len(prompts), 4):
        prompts.at[row, "images"] = []
        prompts.at[row, "prompt"] = [{"role": "user", "content": "What is it?"}]
    prompts.to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)


@pytest.mark.parametrize("family", processors.QWEN)
def test_grpo_on_images(tmp_path: Path, python_path: str, family: str) -> None:
    """vLLM's probabilities are the trainer's before and after updates that move the encoder visibly."""
    make_inputs(tmp_path, family, python_path)
    metrics, _ = train(
        tmp_path,
        "megatrain_verl.main_ppo",
        STEPS,
        f"{ACTOR}.megatrain.dtype=float32",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"{ROLLOUT}.val_kwargs.do_sample=False",
        "trainer.val_before_train=True",
        f"trainer.validation_data_dir={tmp_path}/answers",
        PYTHONPATH=python_path,
    )
    for step in range(1, STEPS + 1):
        assert metrics[step]["training/rollout_probs_diff_max"] <= MOST_DIFFERENCE
        assert 0 < metrics[step]["actor/grad_norm"] < float("inf")
        assert abs(metrics[step]["actor/pg_loss"]) < float("inf")
    assert metrics[STEPS]["actor/kl_loss"] > 0
    answers = [json.loads(line)["output"] for line in (tmp_path / "answers" / "0.jsonl").read_text().splitlines()]
    assert len(answers) == 16 and len(set(answers)) > 2  # greedy, to one question with different images and without
    checkpoint = tmp_path / f"checkpoints/global_step_{STEPS - 1}"
    _check_weights(tmp_path / "model", checkpoint / "actor/huggingface", family)


def _check_weights(first: Path, last: Path, family: str) -> None:
    """The encoder of the last rollout differs so much from the first that vLLM with the first would have shown it."""
    before, after = map(AutoModelForImageTextToText.from_pretrained, (first, last))
    old = before.state_dict()
    moved = {name: (weight - old[name]).abs().max() for name, weight in after.state_dict().items()}
    assert min(change for name, change in moved.items() if ".visual." in name) > 1e-4
    row = cases.rows(family, [1])[0]
    expected = rollout_model.probabilities(after, row)
    after.model.visual = before.model.visual
    assert (rollout_model.probabilities(after, row) - expected).abs().max() > 100 * MOST_DIFFERENCE

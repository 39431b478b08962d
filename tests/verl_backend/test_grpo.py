"""Real GRPO on the CPU: verl's trainer, a real vLLM and the engine; each start of Ray takes about two minutes."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import psutil
import pytest
import torch
from bounded_run import SHARED_MEMORY, segments_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.verl_backend.cases import save_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TWO_RANKS = ("trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(character.isalpha() for character in solution_str) / max(1, len(solution_str))
"""
OPTIONS = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.dataloader_num_workers=0",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ACTOR}.use_torch_compile=False",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.calculate_log_probs=True",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.free_cache_engine=False",
    f"+{ROLLOUT}.enable_sleep_mode=False",
    f"{ROLLOUT}.max_model_len=128",
    f"{ROLLOUT}.max_num_seqs=16",
    f"{ROLLOUT}.max_num_batched_tokens=256",
    f"{ROLLOUT}.agent.num_workers=1",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=16",
    "reward.num_workers=1",
    "reward.custom_reward_function.name=compute_score",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.val_before_train=False",
    "trainer.logger=[console,file]",
    "trainer.save_freq=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.num_gpus=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make_inputs(tmp_path_factory.mktemp("grpo"))


def _make_inputs(folder: Path) -> Path:
    save_tiny_model(folder / "model")
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": 10 * a + b},
        }
        for a in range(4)
        for b in range(4)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def start(
    folder: Path, module: str, steps: int, *options: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start `python -m module` until step `steps`; its metrics and what it prints go to `folder`/until_`steps`.*"""
    metrics = folder / f"until_{steps}.jsonl"
    settings = {
        "VERL_PLATFORM": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # as the scripts set it: other tests must not starve the workers
        "VERL_FILE_LOGGER_PATH": str(metrics),
    }
    files = [
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        f"reward.custom_reward_function.path={folder}/reward.py",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"trainer.total_training_steps={steps}",
    ]
    with (folder / f"until_{steps}.log").open("w") as log:
        return subprocess.Popen(
            [*launcher, sys.executable, "-m", module, *OPTIONS, *files, *options],
            env={**os.environ, **settings, **environment},
            cwd=folder,
            text=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def train(
    folder: Path, module: str, steps: int, *options: str, **environment: str
) -> tuple[dict[int, dict[str, Any]], str]:
    """Run `python -m module` until step `steps`; returns the metrics by step and what was printed."""
    run = start(folder, module, steps, *options, **environment)
    try:
        returncode = run.wait(timeout=600)
    finally:
        run.kill()
    printed = (folder / f"until_{steps}.log").read_text()
    assert returncode == 0, f"see {folder}/until_{steps}.log, which ends with\n{printed[-3000:]}"
    lines = [json.loads(line) for line in (folder / f"until_{steps}.jsonl").read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}, printed


def test_grpo_and_resume(folder: Path) -> None:
    """The stock command with the reference in the actor; then, resumed by the other command, with a separate one."""
    steps, printed = train(
        folder,
        "verl.trainer.main_ppo",
        3,
        f"{ACTOR}.strategy=megatrain",
        f"+{ACTOR}.megatrain.dtype=float32",
        f"+{ACTOR}.megatrain.checkpoint_interval=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=200",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=300",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.max_actor_ckpt_to_keep=1",
    )
    assert "host memory of the megatrain actor" in printed and "megatrain reference" not in printed
    assert sorted(steps) == [1, 2, 3]
    _check_steps(steps)
    assert steps[3]["actor/kl_loss"] > steps[1]["actor/kl_loss"] > 0
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert [(checkpoints / f"global_step_{step}" / "actor").exists() for step in (1, 2, 3)] == [False, True, True]
    _check_export(folder, checkpoints / "global_step_3" / "actor" / "huggingface")

    steps, printed = train(
        folder,
        "megatrain_verl.main_ppo",
        4,
        f"{ACTOR}.megatrain.dtype=float32",
        f"{ACTOR}.megatrain.ref_in_actor=False",
        f"{ACTOR}.use_kl_loss=False",
        "algorithm.use_kl_in_reward=True",
        f"{ACTOR}.entropy_coeff=0.01",
    )
    assert "host memory of the megatrain reference" in printed and "resumed from checkpoint" in printed
    assert sorted(steps) == [4]
    _check_steps(steps)
    assert steps[4]["actor/reward_kl_penalty"] > 1e-3  # the reference is MODEL_PATH, not what was resumed


def test_grpo_of_lora_adapters(tmp_path: Path) -> None:
    """vLLM gets merged weights, the reference is the model without adapters, and a checkpoint has the adapter alone."""
    folder = _make_inputs(tmp_path)
    model = "actor_rollout_ref.model"
    steps, printed = train(
        folder,
        "verl.trainer.main_ppo",
        3,
        "model_engine=megatrain",
        f"{ACTOR}.megatrain.dtype=float32",
        f"{ACTOR}.use_kl_loss=True",
        f"{model}.lora_rank=4",
        f"{model}.target_modules=[q_proj,v_proj,down_proj]",
        f"{model}.lora.merge=True",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"+{ACTOR}.checkpoint.save_lora_only=True",
    )
    assert "megatrain reference" not in printed and "  reference  " not in printed
    assert sorted(steps) == [1, 2, 3]
    _check_steps(steps)
    assert steps[3]["actor/kl_loss"] > 1e-4
    adapter = folder / "checkpoints" / "global_step_3" / "actor" / "lora_adapter"
    moved = load_file(adapter / "adapter_model.safetensors")
    assert len(moved) == 12 and all(weight.abs().max() > 1e-4 for weight in moved.values())


def _check_steps(steps: dict[int, dict[str, Any]]) -> None:
    for metrics in steps.values():
        assert metrics["training/rollout_probs_diff_max"] <= 1e-3
        assert metrics["actor/grad_norm"] > 0 and metrics["actor/lr"] == pytest.approx(1e-3)


def _check_export(folder: Path, exported: Path) -> None:
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder / "model", exported))
    moved = [(after[name] - before[name]).abs().max().item() for name in before]
    assert min(moved) > 1e-4 and all(torch.isfinite(weight).all() for weight in after.values())


@pytest.fixture
def endless(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run of 500 steps as the scripts start it, with the options of its parameter, and the mark of its processes;
    nothing of it may stay behind.
    """
    mark, segments = str(uuid.uuid4()), set(SHARED_MEMORY.iterdir())
    for name in ("until_500.jsonl", "transfer"):
        (folder / name).unlink(missing_ok=True)
    options = [f"{ACTOR}.megatrain.dtype=float32", "trainer.save_freq=-1", "trainer.resume_mode=disable"]
    options += [*getattr(request, "param", ()), "actor_rollout_ref.model.external_lib=tests.verl_backend.slow_export"]
    sampler = "trainer.v1.sampler.custom_sampler"
    options += [f"{sampler}.path=pkg://megatrain_verl.verl_backend.sampler", f"{sampler}.name=PromptSampler"]
    bounded = (sys.executable, str(ROOT / "examples/bounded_run.py"), "1500")
    environment = {"MEGATRAIN_TEST_RUN": mark, "SLOW_EXPORT_MARK": str(folder / "transfer")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = start(folder, "megatrain_verl.main_ppo", 500, *options, launcher=bounded, **environment)
    try:
        yield run, mark
        assert not _marked(mark)
        end = time.monotonic() + 60
        while left := _unused(set(SHARED_MEMORY.iterdir()) - segments):
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(1)
    finally:
        for process in [run, *_marked(mark)]:
            process.kill()


def _unused(segments: set[Path]) -> set[Path]:
    """Those that no process uses; the others belong to tests in other processes, and go with them."""
    return segments - segments_of(list(psutil.process_iter()))


def _kill(mark: str, name: str, count: int = 1) -> int:
    """Kill the last of the `count` processes of a run whose names begin so, as the kernel does without memory; its
    number.
    """
    processes = [process for process in _marked(mark) if process.name().startswith(name)]
    assert len(processes) == count
    processes[-1].kill()
    return processes[-1].pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endless", "ranks"), [((), 1), (TWO_RANKS, 2)], indirect=["endless"], ids=["one rank", "two ranks"]
)
def test_killed_worker_ends_the_run_and_leaves_nothing(folder: Path, endless: tuple, ranks: int) -> None:
    """A process of actor and engine, killed between two steps."""
    run, mark = endless
    _wait_for(lambda: _has_lines(folder / "until_500.jsonl"), seconds=900)
    pid = _kill(mark, "ray::Worker", ranks)
    assert run.wait(timeout=60) not in (0, 124)
    printed = (folder / "until_500.log").read_text()
    assert f"pid: {pid}" in printed or f"pid={pid}" in printed
    assert "ActorDiedError" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "process"), [("transfer", "VLLM::Worker"), ("transfer", "VLLM::Engine"), ("steps", "VLLM::Engine")]
)
def test_killed_vllm_ends_the_run_and_leaves_nothing(folder: Path, endless: tuple, moment: str, process: str) -> None:
    """vLLM's worker or engine process, killed while it receives weights, or between two steps."""
    run, mark = endless
    begun = (folder / "transfer").exists if moment == "transfer" else lambda: _has_lines(folder / "until_500.jsonl", 2)
    _wait_for(begun, seconds=900)
    _kill(mark, process)
    assert run.wait(timeout=60) not in (0, 124)
    printed = (folder / "until_500.log").read_text()
    assert "the vLLM engine process of rollout replica 0 died" in printed or "EngineDeadError" in printed


def _has_lines(file: Path, count: int = 1) -> bool:
    return file.exists() and file.read_text().count("\n") >= count


def _marked(mark: str) -> list[psutil.Process]:
    """The processes of the run whose environment holds `mark`, zombies apart."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MEGATRAIN_TEST_RUN") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended, or is a zombie, or belongs to someone else
    return found


def _wait_for(condition: Callable[[], bool], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not reached within {seconds} s"
        time.sleep(1)

"""Device memory that the engine leaves to a colocated vLLM, and the weight transfer by CUDA IPC.

`python -m pytest tests/gpu/test_colocation_cuda.py -s` prints the figures. Each case runs in processes of its own.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def run_case(name: str, folder: Path) -> str:
    """Run a function of this file as a program; what it printed."""
    code = "import pathlib; from tests.gpu import test_colocation_cuda as cases; "
    code += f"cases.{name}(pathlib.Path({str(folder)!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def make_engine(folder: Path, **options: object):
    """A bfloat16 actor of 200 million parameters on the device, as a verl worker makes it."""
    import torch.distributed
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    import megatrain_verl.verl_backend.plugin  # noqa: F401
    from megatrain_verl.verl_backend.config import MegaTrainEngineConfig
    from tests.verl_backend.cases import save_tiny_model

    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    save_tiny_model(folder / "model")
    saved = Qwen2Config.from_pretrained(folder / "model")
    config = Qwen2Config(
        vocab_size=saved.vocab_size,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=128,
        eos_token_id=saved.eos_token_id,
        pad_token_id=saved.pad_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="megatrain",
        model_config=HFModelConfig(path=str(folder / "model")),
        engine_config=MegaTrainEngineConfig(**options),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=8),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def contract(folder: Path) -> None:
    """0 bytes after the start; 64 MiB at most whenever the rollout has the device; a limit in training."""
    import torch

    from tests.verl_backend.cases import actor_loss, rl_batch, score, train, weights

    engine = make_engine(folder, gpu_memory_utilization=0.02)
    total = torch.cuda.mem_get_info()[1]

    def held(when: str) -> tuple[int, int]:
        figures = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()]
        print(when, "allocated, reserved, peak MiB:", *[round(figure / MIB) for figure in figures], flush=True)
        return figures[0], figures[1]

    assert held("before the rollout starts") == (0, 0)
    batch = rl_batch(engine.model_config.hf_config.vocab_size, rows=8)
    for step in range(3):
        score(engine, batch)
        assert max(held(f"step {step}, log-probs given back")) <= 64 * MIB
        train(engine, batch, actor_loss())
        assert torch.cuda.max_memory_allocated() <= 0.02 * total
        held(f"step {step}, update")
        assert all(weight.isfinite().all() for weight in weights(engine).values())
        engine.to("cpu", model=True, optimizer=False, grad=False)
        assert max(held(f"step {step}, weights sent")) <= 64 * MIB
    print({name: metric.aggregate() for name, metric in engine.phases.metrics().items()})


def test_the_rollout_gets_the_device(tmp_path: Path) -> None:
    run_case("contract", tmp_path)


def receive_all(handle: str, sums: "multiprocessing.Queue") -> None:
    """vLLM's side: sum of each weight, by name."""
    import torch
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    import megatrain_verl.verl_backend.plugin  # noqa: F401

    received: dict[str, float] = {}

    def take(weights: list, is_last: bool) -> None:
        received.update((name, weight.double().sum().item()) for name, weight in weights)

    BucketedWeightReceiver(handle, torch.device("cuda:0")).receive_weights(take)
    sums.put(received)


def transfer(folder: Path) -> None:
    """All weights by CUDA IPC to another process, with a bucket that the MLP's matrices (8 MiB) do not fit into."""
    import asyncio
    import time

    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from tests.verl_backend.cases import weights

    engine = make_engine(folder, update_weights_bucket_megabytes=4)
    context = multiprocessing.get_context("spawn")
    handle, sums = f"ipc://{folder}/weights", context.Queue()
    receiver = context.Process(target=receive_all, args=(handle, sums))
    receiver.start()
    start = time.perf_counter()
    asyncio.run(BucketedWeightSender(handle, bucket_size_mb=4).async_send_weights(engine.get_per_tensor_param()[0]))
    print(f"transfer, with the start of the receiver: {time.perf_counter() - start:.2f} s")
    expected = {name: weight.double().sum().item() for name, weight in weights(engine).items()}
    assert any(weight.nbytes > 4 * MIB for weight in weights(engine).values())
    found = sums.get(timeout=60)
    receiver.join(timeout=60)
    assert found.keys() == expected.keys()
    assert all(abs(found[name] - expected[name]) <= 1e-6 * max(1.0, abs(expected[name])) for name in expected)


def test_weights_larger_than_the_bucket_reach_another_process(tmp_path: Path) -> None:
    run_case("transfer", tmp_path)

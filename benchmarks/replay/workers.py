"""verl's `TrainingWorker` in this process, around the streaming engine or around verl's own FSDP2 engine."""

import copy
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from megatrain_verl.verl_backend.config import MegaTrainActorConfig, MegaTrainEngineConfig

FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def single_process() -> None:
    """What a launcher of one process sets in the environment; verl's worker reads it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def actor_config(engine: str, dtype: str, options: dict[str, Any]) -> MegaTrainActorConfig | FSDPActorConfig:
    """The actor's options: loss and optimizer as recorded, the engine with verl's defaults in `dtype`.

    FSDP2 in bfloat16 keeps float32 weights and computes in bfloat16, which is verl's default; the streaming engine
    computes with the bfloat16 half of its float32 master weights.
    """
    common = {**options["loss"], "optim": FSDPOptimizerConfig(**options["optim"])}
    if engine == "megatrain":
        return MegaTrainActorConfig(**common, megatrain=MegaTrainEngineConfig(dtype=dtype, ref_in_actor=False))
    precision = FLOAT32 if dtype == "float32" else None
    fsdp = FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=precision, use_torch_compile=False)
    return FSDPActorConfig(**common, strategy="fsdp2", fsdp_config=fsdp)


def build(engine: str, model: Path, dtype: str, options: dict[str, Any]) -> TrainingWorker:
    """A worker with `model` loaded, ready for `train_mini_batch`, as `ActorRolloutRefWorker.init_model` makes it."""
    actor = actor_config(engine, dtype, options)
    # Without removed padding FSDP2 needs no flash-attn; the streaming engine packs its rows in any case.
    model_config = HFModelConfig(path=str(model), use_remove_padding=False)
    if engine == "fsdp2":
        model_config.hf_config._attn_implementation = "sdpa"
    actor.engine.use_dynamic_bsz = False
    actor.engine.micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=copy.deepcopy(model_config),
            engine_config=actor.engine,
            optimizer_config=actor.optim,
            checkpoint_config=actor.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker

"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to pinned host memory, DeepSpeedCPUAdam."""

import os
import socket

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from workload import ADAMW, CLIP_GRAD, Workload, draw_weight


class Zero3:
    """One rank, gradient checkpointing by transformers, ZeRO's own gradient accumulation."""

    def __init__(self, workload: Workload, micro_batch: int) -> None:
        on_gpu = workload.device == "cuda"
        _single_process()
        deepspeed.init_distributed("nccl" if on_gpu else "gloo", auto_mpi_discovery=False)
        settings = deepspeed_config(workload, micro_batch)
        model = build_model(workload, settings)
        optimizer = DeepSpeedCPUAdam(model.parameters(), **ADAMW, adamw_mode=True)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        zero = settings["zero_optimization"]
        buckets = ", ".join(f"{key} {value:.0e}" for key, value in zero.items() if isinstance(value, float))
        self.settings = (
            f"stage 3, parameters and optimizer on the host (pinned), overlap_comm, contiguous_gradients, {buckets}, "
            f"{'bfloat16' if on_gpu else 'float32'} compute, gradient checkpointing, sdpa, DeepSpeedCPUAdam on "
            f"{torch.get_num_threads()} threads"
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self._engine(input_ids=ids, labels=ids, use_cache=False).loss

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.backward(loss)
        if not last:
            self._engine.step()  # counts the micro-batch

    def step(self) -> None:
        self._engine.step()


def deepspeed_config(workload: Workload, micro_batch: int) -> dict[str, object]:
    """The JSON configuration; the buckets hold one to two layers of a 7B model, small parameters stay on the device."""
    pinned = {"device": "cpu", "pin_memory": workload.device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": workload.rows // micro_batch,
        "gradient_clipping": CLIP_GRAD,
        "bf16": {"enabled": workload.device == "cuda"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": pinned,
            "offload_optimizer": pinned,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e8,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6,
            "stage3_max_live_parameters": 2e9,
            "stage3_max_reuse_distance": 2e9,
            "sub_group_size": 1e9,
        },
    }


def build_model(workload: Workload, settings: dict[str, object]) -> torch.nn.Module:
    """The model with its start values, each module partitioned to the host as soon as it is made."""
    dtype = torch.bfloat16 if workload.device == "cuda" else torch.float32
    config = workload.config
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=settings, dtype=dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config, device=workload.device)  # in float32, on the device
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(draw_weight(name, parameter.shape, workload.device))
    return model


def _single_process() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

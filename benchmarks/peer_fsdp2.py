"""PyTorch FSDP2 with CPUOffloadPolicy: FP32 parameters, gradients and AdamW on the host, bfloat16 compute."""

import os
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from workload import ADAMW, CLIP_GRAD, Workload, draw_weight

TRIAL_ELEMENTS = 25_000_000  # a large matrix of a layer; four of them make one trial


class Fsdp2:
    """One rank, one FSDP group per decoder layer, gradient checkpointing by transformers.

    Gradients of the micro-batches add up in FP32 on the device and leave once per step.
    """

    def __init__(self, workload: Workload, micro_batch: int) -> None:
        on_gpu = workload.device == "cuda"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self._model = build_model(workload)
        self._micro_batches = workload.rows // micro_batch
        implementation = faster_adamw()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW, **{implementation: True})
        self.settings = (
            f"fully_shard per decoder layer, CPUOffloadPolicy(pin_memory={on_gpu}), "
            f"{'bfloat16' if on_gpu else 'float32'} compute, float32 parameters and gradients, gradient checkpointing, "
            f"sdpa, AdamW({implementation}=True) on {torch.get_num_threads()} threads"
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self._model(input_ids=ids, labels=ids, use_cache=False).loss

    def backward(self, loss: Tensor, last: bool) -> None:
        self._model.set_requires_gradient_sync(last)
        (loss / self._micro_batches).backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_GRAD)
        self._optimizer.step()
        self._optimizer.zero_grad()


def build_model(workload: Workload) -> FSDPModule:
    """The sharded model with its start values; made on the meta device, so nothing is in memory twice."""
    device = workload.device
    config = workload.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    options = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
    }
    decoder = model.get_decoder()
    for layer in decoder.layers:
        fully_shard(layer, **options)
    if not config.tie_word_embeddings:
        fully_shard(decoder.embed_tokens, **options)
        fully_shard([decoder.norm, model.get_output_embeddings()], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    model.to_empty(device="cpu")
    model.tie_weights()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config, device=device)  # its buffers were on meta too
    for name, parameter in model.named_parameters():
        parameter.to_local().detach().copy_(draw_weight(name, parameter.shape, device))
    return model


def faster_adamw() -> str:
    """`fused` or `foreach`, whichever implementation of torch.optim.AdamW takes less time on this host."""
    seconds = {}
    for implementation in ("fused", "foreach"):
        weights = [torch.zeros(TRIAL_ELEMENTS, requires_grad=True) for _ in range(4)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW(weights, **{implementation: True})
        optimizer.step()  # makes the moments
        start = time.perf_counter()
        optimizer.step()
        seconds[implementation] = time.perf_counter() - start
    return min(seconds, key=seconds.get)

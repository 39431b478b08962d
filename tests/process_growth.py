"""Bytes by which a process grows while it trains: `python -m tests.process_growth DEVICE SHAPE OPTIONS_AS_JSON`

Prints JSON: `plan` (HostPlan.total) and `grown`, the private and shared bytes of the process (Pss) after two steps
less those after the imports and, on CUDA, after the context exists. On the CPU the plan is that of the host; what the
engine would hold on a device (slots, accumulators, kept inputs) is in the same memory there and is released before.
"""

import gc
import json
import re
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch, TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine

SHAPES = {
    "60m": Qwen2Config(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=6,
        tie_word_embeddings=False,
    ),
    "1.5b": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}
TOKENS = 16


def process_bytes() -> int:
    """This process's share of memory: private pages, and shared ones divided by their users."""
    gc.collect()
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024


def measure(device: str, shape: str, *, reference: bool = False, **options: object) -> dict[str, int]:
    """`plan` and `grown`, in bytes."""
    torch.set_num_threads(1)
    warm_up(device)
    before = process_bytes()
    engine = StreamingEngine(
        SHAPES[shape], StreamingConfig(cpu_threads=1, **options), AdamWConfig(), device=device, keep_reference=reference
    )
    ids = torch.arange(TOKENS)
    batches = [MicroBatch(ids, ids, [TOKENS]) for _ in range(2)]
    for _ in range(2):
        engine.zero_grad()
        engine.forward_backward(batches, loss)
        engine.optimizer_step()
    engine.release_device()
    for _ in engine.named_weights():
        pass  # waits for AdamW
    return {"plan": engine.host_plan.total, "grown": process_bytes() - before}


def loss(index: int, outputs: TokenOutputs) -> torch.Tensor:
    """A loss with a gradient."""
    return -outputs.log_probs.mean()


def warm_up(device: str) -> None:
    """What every process takes that computes on `device`: libraries' buffers, threads, the CUDA context."""
    weight = torch.randn(256, 256, device=device, requires_grad=True)
    (weight @ weight).sum().backward()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))))

"""Bytes by which a process grows while it trains: `python -m tests.process_growth DEVICE SHAPE OPTIONS_AS_JSON`

Prints JSON: `plan` (HostPlan.total) and `grown`, the resident bytes of the process after two steps less those after
the same two steps of a tiny model, which hold what does not depend on the model: libraries, their buffers, threads,
the CUDA context. On the CPU what the engine would hold on a device (slots, accumulators, kept inputs) is in the same
memory and is released before measuring; on CUDA it is not, and `peak`, of the same start, is the most at any time.
"""

import ctypes
import gc
import json
import re
import resource
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch, TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine

SHAPES = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "100m": {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7},
    "1.5b": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
}
HEADS = {"tiny": (2, 2), "100m": (16, 16), "1.5b": (12, 2)}  # of queries, of keys and values
TOKENS = 16


def resident_bytes() -> int:
    """Memory of this process that is not swapped out, without what the C library keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def train(device: str, shape: str, *, reference: bool = False, **options: object) -> StreamingEngine:
    """An engine after two steps, whose AdamW has ended and whose device memory is released."""
    queries, keys = HEADS[shape]
    model = Qwen2Config(
        **SHAPES[shape], num_attention_heads=queries, num_key_value_heads=keys, tie_word_embeddings=shape == "1.5b"
    )
    adamw = AdamWConfig(clip_grad=None)  # what is updated ahead is never dropped
    engine = StreamingEngine(model, StreamingConfig(**options), adamw, device=device, keep_reference=reference)
    ids = torch.arange(TOKENS)
    batches = [MicroBatch(ids, ids, [TOKENS]) for _ in range(2)]
    for _ in range(2):
        engine.zero_grad()
        engine.forward_backward(batches, loss, next_lr=adamw.lr)
        engine.optimizer_step(adamw.lr)
    engine.release_device()
    for _ in engine.named_weights():
        pass  # waits for AdamW
    return engine


def loss(index: int, outputs: TokenOutputs) -> torch.Tensor:
    """A loss with a gradient."""
    return -outputs.log_probs.mean()


def measure(device: str, shape: str, **options: object) -> dict[str, int]:
    """`plan`, `grown` and, on CUDA, `peak`, in bytes."""
    train(device, "tiny", **options).close()
    before = resident_bytes()
    engine = train(device, shape, **options)
    found = {"plan": engine.host_plan.total, "grown": resident_bytes() - before}
    if device == "cuda":
        found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))))

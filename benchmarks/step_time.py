"""Seconds of a training step of the streaming engine on one GPU, against the bound.

    python benchmarks/step_time.py --model qwen2.5-7b --rows 32 --seq-len 1024 [--micro-batch 8] [--json FILE]

Random weights, a cross-entropy loss on random tokens: forward, backward, clipping, AdamW. Steps follow each other as in
training, so AdamW of one step runs under the next. Two more steps wait for AdamW first: the difference is what is not
hidden. The first loss of a step marks the end of its forward pass.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch
from ceilings import Ceilings, bound_seconds, measure
from shapes import model_config

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.streaming.batch import MicroBatch, TokenOutputs
from megatrain_verl.streaming.engine import StreamingEngine

WARM_UP = 2


def resident_bytes() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def random_weights(engine: StreamingEngine) -> None:
    """Standard deviation 0.02, norms 1: drawn on the device, which is faster than on the host."""
    for unit, span in engine.state.parameters():
        view = unit.view(unit.weight, span)
        if len(span.shape) > 1:
            view.copy_(torch.randn(span.shape, device="cuda", dtype=torch.bfloat16) * 0.02)
        else:
            view.fill_(1.0 if span.name.endswith("norm.weight") else 0.0)


def random_batch(rows: int, length: int, micro_batch: int, vocabulary: int) -> list[MicroBatch]:
    """`rows` rows of `length` random tokens, `micro_batch` rows at a time."""
    ids = torch.randint(0, vocabulary, (rows, length))
    groups = ids.split(micro_batch)
    return [MicroBatch(g.flatten(), torch.arange(length).repeat(len(g)), [length] * len(g)) for g in groups]


def run_step(engine: StreamingEngine, batch: list[MicroBatch], tokens: int) -> tuple[float, float, float]:
    """(seconds, of them forward, of them backward) of one step without waiting for its AdamW."""
    torch.cuda.synchronize()
    begin, forward_end, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def loss_fn(index: int, scores: TokenOutputs) -> torch.Tensor:
        if index == 0:
            forward_end.record()
        return -scores.log_probs.sum() / tokens

    start = time.perf_counter()
    begin.record()
    engine.zero_grad()
    engine.forward_backward(batch, loss_fn)
    end.record()
    engine.optimizer_step()
    seconds = time.perf_counter() - start
    end.synchronize()
    return seconds, begin.elapsed_time(forward_end) / 1e3, forward_end.elapsed_time(end) / 1e3


def wait_for_adamw(engine: StreamingEngine) -> float:
    """Seconds until every unit is updated."""
    start = time.perf_counter()
    for _ in engine.named_weights():
        pass
    return time.perf_counter() - start


def measure_engine(arguments: argparse.Namespace, ceilings: Ceilings) -> dict[str, object]:
    """The row of the streaming engine."""
    config = model_config(arguments.model, arguments.layers)
    before = resident_bytes()
    settings = StreamingConfig(
        compile_layers=arguments.compile,
        optimizer_backend=arguments.optimizer,
        checkpoint_interval=arguments.checkpoint_interval,
        head_chunk_tokens=arguments.head_chunk,
        host_memory_gb=arguments.host_memory_gb,
    )
    engine = StreamingEngine(config, settings, AdamWConfig(lr=1e-5), device="cuda")
    random_weights(engine)
    tokens = arguments.rows * arguments.seq_len
    micro_batch = arguments.micro_batch or arguments.rows

    def step() -> tuple[float, float, float]:
        return run_step(engine, random_batch(arguments.rows, arguments.seq_len, micro_batch, config.vocab_size), tokens)

    for _ in range(WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    sent, received = engine.counters.h2d_bytes, engine.counters.d2h_bytes
    times = [step() for _ in range(arguments.steps)]
    sent, received = engine.counters.h2d_bytes - sent, engine.counters.d2h_bytes - received
    adamw_alone = wait_for_adamw(engine)
    waited = []
    for _ in range(2):
        waited.append(step()[0])
        adamw_alone = max(adamw_alone, wait_for_adamw(engine))
    seconds, forward, backward = (statistics.median(part) for part in zip(*times, strict=True))
    parameters = engine.num_parameters
    embedding = config.vocab_size * config.hidden_size
    row = {
        "system": "megatrain",
        "step_s": seconds,
        "forward_s": forward,
        "backward_s": backward,
        "step_without_adamw_s": min(waited),
        "adamw_not_hidden_s": max(0.0, seconds - min(waited)),
        "adamw_alone_s": adamw_alone,
        "tokens_per_s": tokens / seconds,
        "tflops": 6 * parameters * tokens / seconds / 1e12,
        "tflops_without_embedding": 6 * (parameters - embedding) * tokens / seconds / 1e12,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(),
        "host_bytes_per_parameter": (resident_bytes() - before) / parameters,
        "h2d_bytes": sent // arguments.steps,
        "d2h_bytes": received // arguments.steps,
        "bound_s": bound_seconds(engine.plan, tokens, ceilings, engine.adamw_backend, hidden_adamw=False),
        "bound_hidden_adamw_s": bound_seconds(engine.plan, tokens, ceilings, engine.adamw_backend, hidden_adamw=True),
    }
    row["ratio_to_bound"] = seconds / row["bound_s"]
    engine.close()
    return row


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="cut the model to that many layers")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, help="rows per micro-batch; default: all rows")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--optimizer", default="auto")
    parser.add_argument("--checkpoint-interval", type=int, default=1)
    parser.add_argument("--head-chunk", type=int, default=1024)
    parser.add_argument("--host-memory-gb", type=float)
    parser.add_argument("--all-adamw-backends", action="store_true", help="also measure deepspeed and torch AdamW")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ceilings = measure() if arguments.all_adamw_backends else measure(("native",))
    row = measure_engine(arguments, ceilings)
    report = {"arguments": vars(arguments) | {"json": None}, "ceilings": dataclasses.asdict(ceilings), "rows": [row]}
    rates = ", ".join(f"{name} {rate / 1e9:.2f}e9/s" for name, rate in ceilings.adamw.items())
    print(f"ceilings: H2D {ceilings.h2d / 1e9:.1f} GB/s, D2H {ceilings.d2h / 1e9:.1f} GB/s, "
          f"matmul {ceilings.matmul / 1e12:.0f} TFLOP/s, AdamW {rates}")  # fmt: skip
    for name, value in row.items():
        print(f"{name:>26}  {value if isinstance(value, str) else round(value, 4)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

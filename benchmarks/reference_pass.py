"""Seconds of a reference pass by where its weights are: in host memory, in a file that is cached, and on the disk.

    python benchmarks/reference_pass.py --model qwen2.5-0.5b --folder DIR --rows 1 --seq-len 64

Medians. Random weights and tokens. `waited`: of the pass, the time in which the engine waited for the file; `read`: the
time in which the file was read.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from shapes import model_config
from workload import draw_weight

from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.model_sizes import ModelSizes
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.engine import StreamingEngine

TOKENS_PER_MICRO_BATCH = 8192


def make_engine(arguments: argparse.Namespace, folder: str | None) -> StreamingEngine:
    """An engine with a reference in `folder`, or in host memory."""
    model = model_config(arguments.model, arguments.layers)
    config = StreamingConfig(reference_folder=folder, device_adamw=False)
    engine = StreamingEngine(model, config, AdamWConfig(), device=arguments.device, keep_reference=True)
    spans = [(span.name, span.shape) for unit in engine.plan.units for span in unit.spans]
    start = time.perf_counter()
    engine.load_weights((name, draw_weight(name, shape, arguments.device).cpu()) for name, shape in spans)
    print(f"weights made{' and written' if folder else ''} in {time.perf_counter() - start:.1f} s", flush=True)
    return engine


def forget_cached(folder: str) -> None:
    """Drop the pages of this process's files without a name in `folder` from the page cache."""
    for link in Path("/proc/self/fd").iterdir():
        target = os.readlink(link) if link.is_symlink() else ""
        if target.startswith(os.path.realpath(folder)) and target.endswith("(deleted)"):
            os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)


def waited(engine: StreamingEngine) -> float:
    """Seconds for which the engine has waited for the reference's file."""
    return sum(seconds for reason, seconds in engine.streams.waited.items() if reason.startswith("reference buffer"))


def measure(engine: StreamingEngine, arguments: argparse.Namespace, cold: bool) -> list[tuple[float, ...]]:
    """Of each pass: its seconds, those waited for the file, those in which the file was read. A first one warms up."""
    generator, vocab = torch.Generator().manual_seed(1), engine.plan.vocab_size
    ids, length = torch.randint(0, vocab, (arguments.rows, arguments.seq_len), generator=generator), arguments.seq_len
    batches = [
        MicroBatch(rows.flatten(), torch.arange(length).repeat(len(rows)), [length] * len(rows))
        for rows in ids.split(max(1, TOKENS_PER_MICRO_BATCH // length))
    ]
    found = []
    for _ in range(arguments.passes + 1):
        engine.streams.reader.record().synchronize()  # what was read ahead
        if cold:
            forget_cached(arguments.folder)
        engine.streams.reader.spans.clear()
        before, start = waited(engine), time.perf_counter()
        with engine.reference_weights():
            engine.forward(batches)
        seconds = time.perf_counter() - start
        engine.streams.reader.record().synchronize()
        read = sum(end - begin for begin, end in engine.streams.reader.spans)
        found.append((seconds, waited(engine) - before, read))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b", help="a name of shapes.py, or a folder with config.json")
    parser.add_argument("--layers", type=int, help="cut the model to that many")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1536)
    parser.add_argument("--passes", type=int, default=3, help="measured ones")
    parser.add_argument("--folder", required=True, help="for the file")
    parser.add_argument("--only-file", action="store_true", help="leave out the reference in host memory, 2 bytes more")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    nbytes = 2 * ModelSizes.of(model_config(arguments.model, arguments.layers)).num_parameters
    places = [(None, ["in host memory"]), (arguments.folder, ["in the page cache", "on the disk"])]
    for folder, states in places[arguments.only_file :]:
        engine = make_engine(arguments, folder)
        for state in states:
            passes = measure(engine, arguments, cold=state == "on the disk")
            seconds, waits, read = (statistics.median(column) for column in zip(*passes, strict=True))
            rate = f", read in {read:.2f} s, {nbytes / read / 1e6:,.0f} MB/s" if read else ""
            print(f"{nbytes / 1e9:.2f} GB {state}: {seconds:.2f} s, waited {waits:.2f} s{rate}", flush=True)
        engine.close()


if __name__ == "__main__":
    main()

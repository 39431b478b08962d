"""Seconds of a training step, of this engine and of what one would use instead, against the bound of this machine.

    python benchmarks/step_time.py --model qwen2.5-7b --rows 32 --seq-len 1024 --peers fsdp2,zero3 --json FILE
    python benchmarks/step_time.py --model qwen2.5-7b --rows 64 --seq-len 1024 --devices 0,1

The second one measures the engine on the first device, then on all of them with the same rows; with `--reads full,once`
on all of them twice: every one reads all weights from the host, and each weight is read once and sent on.

Random weights and tokens, the same for every system: forward, backward, clipping and AdamW, two steps to warm up and
three measured ones. Each system runs in a process of its own; one that fails becomes a row with its error. The column
`loss` is that of the last measured step: systems that do the same work agree in it.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from ceilings import Ceilings
from processes import ANY_DEVICE, run_system
from report import finish, table
from system import READS
from workload import Workload

from megatrain_verl.model_sizes import ModelSizes

PEERS = ("fsdp2", "zero3")
TOKENS_PER_MICRO_BATCH = 8192


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b", help="a name of benchmarks/shapes.py, or a config.json")
    parser.add_argument("--layers", type=int, help="cut the model to that many layers")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument(
        "--micro-batch", type=int, help="rows per micro-batch; default: 8192 tokens, for peers the most that fits"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--peers", type=_peers, default=[], help=f"others to measure, of {', '.join(PEERS)}")
    parser.add_argument("--only-peers", action="store_true", help="leave out this project's engine")
    parser.add_argument(
        "--engine", type=_option, action="append", default=[], metavar="FIELD=VALUE", help="a StreamingConfig field"
    )
    parser.add_argument("--host-memory-gb", type=float, help="GiB of the host that may be in use")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for each system")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--devices",
        type=lambda text: text.split(","),
        default=[ANY_DEVICE],
        help="as in CUDA_VISIBLE_DEVICES: the engine on the first, then on all together (on CPU, as many processes)",
    )
    parser.add_argument("--reads", type=_reads, default=["full"], help=f"of several devices: {', '.join(READS)}")
    parser.add_argument("--only-group", action="store_true", help="with several devices, leave the first alone out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path, help="timeline of one step of the engine, for ui.perfetto.dev, and a PNG")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse()
    fields = {field.name for field in dataclasses.fields(Workload)}
    workload = Workload(**{name: value for name, value in vars(arguments).items() if name in fields})
    sizes = ModelSizes.of(workload.config)
    measured = _run("ceilings", workload, arguments, arguments.devices[:1], "full")
    if "error" in measured:
        raise SystemExit(f"the ceilings of this machine could not be measured: {measured['error']}")
    ceilings = Ceilings(**measured)
    print(ceilings, flush=True)
    rows = []
    own = _own_systems(arguments)
    for name, devices, reads in own + [(peer, arguments.devices[:1], "full") for peer in arguments.peers]:
        measured = _run(name.partition(" ")[0], workload, arguments, devices, reads)
        row = measured if "error" in measured else finish(measured, workload, sizes, ceilings)
        rows.append({"system": name} | row)
        print(table(rows[-1:]), flush=True)
    print(table(rows))
    for row in rows[1 : len(own)] if own and len(own[0][1]) == 1 else []:
        if "error" not in rows[0] | row:
            print(f"{row['system']}: {rows[0]['step_s'] / row['step_s']:.3f} times as fast as one device")
    if arguments.json:
        report = {"workload": dataclasses.asdict(workload), "ceilings": ceilings.as_dict(), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))


def _own_systems(arguments: argparse.Namespace) -> list[tuple[str, list[str], str]]:
    """Name, devices and way of reading of each row of this project's engine."""
    devices, count = arguments.devices, len(arguments.devices)
    alone = [("megatrain", devices[:1], "full")] if count == 1 or not arguments.only_group else []
    several = [(f"megatrain x {count}, reads {reads}", devices, reads) for reads in arguments.reads if count > 1]
    return [] if arguments.only_peers else alone + several


def _run(
    system: str, workload: Workload, arguments: argparse.Namespace, devices: list[str], reads: str
) -> dict[str, object]:
    own = system == "megatrain"
    micro_batch, options = arguments.micro_batch, dict(arguments.engine)
    if own and micro_batch is None:
        micro_batch = max(1, min(workload.rows, TOKENS_PER_MICRO_BATCH // workload.seq_len))
    if arguments.host_memory_gb is not None:
        options["host_memory_gb"] = arguments.host_memory_gb
    spec = {
        "system": system,
        "workload": dataclasses.asdict(workload),
        "micro_batch": micro_batch,
        "options": options,
        "trace": str(arguments.trace.absolute()) if own and arguments.trace and len(devices) == 1 else None,
        "devices": devices,
        "reads": reads,
    }
    limit = None if arguments.host_memory_gb is None else arguments.host_memory_gb * 2**30
    return run_system(spec, arguments.timeout, limit)


def _reads(text: str) -> list[str]:
    ways = text.split(",")
    if unknown := set(ways) - READS.keys():
        raise argparse.ArgumentTypeError(f"unknown way {', '.join(unknown)}; there are {', '.join(READS)}")
    return ways


def _peers(text: str) -> list[str]:
    peers = text.split(",")
    if unknown := set(peers) - set(PEERS):
        raise argparse.ArgumentTypeError(f"unknown peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return peers


def _option(text: str) -> tuple[str, object]:
    """FIELD=VALUE, the value as JSON where it is that and as text otherwise."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    main()

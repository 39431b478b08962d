"""Seconds of a training step, of this engine and of what one would use instead, against the bound of this machine.

    python benchmarks/step_time.py --model qwen2.5-7b --rows 32 --seq-len 1024 --peers fsdp2,zero3 --json FILE
    python benchmarks/step_time.py --model qwen2.5-7b --rows 64 --seq-len 1024 --devices 0,1

The second one measures the engine on the first device, then on all of them with the same rows.

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
    measured = _run("ceilings", workload, arguments, arguments.devices[:1])
    if "error" in measured:
        raise SystemExit(f"the ceilings of this machine could not be measured: {measured['error']}")
    ceilings = Ceilings(**measured)
    print(ceilings, flush=True)
    rows = []
    systems = [("megatrain", devices) for devices in _device_sets(arguments)]
    for system, devices in systems + [(peer, arguments.devices[:1]) for peer in arguments.peers]:
        measured = _run(system, workload, arguments, devices)
        row = measured if "error" in measured else finish(measured, workload, sizes, ceilings)
        rows.append({"system": system if len(devices) == 1 else f"{system} x {len(devices)}"} | row)
        print(table(rows[-1:]), flush=True)
    print(table(rows))
    if len(systems) > 1 and not any("error" in row for row in rows[:2]):
        print(f"{len(arguments.devices)} devices are {rows[0]['step_s'] / rows[1]['step_s']:.3f} times as fast as one")
    if arguments.json:
        report = {"workload": dataclasses.asdict(workload), "ceilings": ceilings.as_dict(), "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))


def _device_sets(arguments: argparse.Namespace) -> list[list[str]]:
    """The devices of each row of this project's engine."""
    if arguments.only_peers:
        return []
    several = [] if arguments.only_group or len(arguments.devices) == 1 else [arguments.devices[:1]]
    return [*several, arguments.devices]


def _run(system: str, workload: Workload, arguments: argparse.Namespace, devices: list[str]) -> dict[str, object]:
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
    }
    limit = None if arguments.host_memory_gb is None else arguments.host_memory_gb * 2**30
    return run_system(spec, arguments.timeout, limit)


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

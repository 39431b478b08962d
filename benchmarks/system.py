"""One system of the benchmark, or one of its ranks, in a process: `python system.py SPEC RESULT`.

SPEC and RESULT are JSON files: what to run, and the measured fields or how it failed.
"""

import json
import sys
from pathlib import Path

import torch
from peer_loop import HostMemory, largest_micro_batch, measure_peer
from workload import Workload

from megatrain_verl.streaming.group import read_choice
from megatrain_verl.streaming.group.group import ALONE, HostGroup

READS = {"measured": None, "full": False, "once": True}  # how ranks read weights


def run(spec: dict) -> dict[str, object]:
    """The measured fields of `spec["system"]`: megatrain, fsdp2, zero3, or the ceilings of the machine."""
    workload = Workload(**spec["workload"])
    if workload.device == "cuda":
        torch.mm(*torch.ones(2, 64, 64, device="cuda"))  # the CUDA context and cuBLAS belong to no system
    before = HostMemory.now()
    if spec["system"] == "ceilings":
        import ceilings

        return ceilings.measure(workload.device).as_dict()
    if spec["system"] == "megatrain":
        from streaming_system import StreamingSystem

        read_choice.TOGETHER = READS[spec["reads"]]
        ranks = len(spec["devices"])
        group = HostGroup(spec["group"], spec["rank"], ranks) if ranks > 1 else ALONE
        system = StreamingSystem(workload, spec["micro_batch"], spec["options"], group)
        fields = system.measure(before)
        if spec["trace"]:
            system.trace(Path(spec["trace"]))
        system.engine.close()
        return fields
    micro_batch = spec["micro_batch"] or largest_micro_batch(workload)
    if spec["system"] == "fsdp2":
        from peer_fsdp2 import Fsdp2 as Peer
    else:
        from peer_zero3 import Zero3 as Peer
    try:
        return measure_peer(Peer(workload, micro_batch), workload, micro_batch, before)
    except torch.OutOfMemoryError as error:
        return {"error": f"GPU memory: {str(error).splitlines()[0]}", "retry_micro_batch": micro_batch // 2}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))

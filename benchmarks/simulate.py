"""A training step of a model of any size without its weights: python -m benchmarks.simulate --model FOLDER

The engine's own plan, planner, schedule, slots, accumulators and layers run on torch's meta device, whose tensors have
shapes and no content. A ledger counts the bytes of all tensors that would be on the GPU. Not real: the arithmetic, the
time, the host arenas (their plan is printed), and attention, which keeps what a flash-attention kernel keeps.
"""

import argparse
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface

from benchmarks.shapes import model_config
from megatrain_verl.config import AdamWConfig, StreamingConfig
from megatrain_verl.model_sizes import ModelSizes
from megatrain_verl.resources import GIB, MARGIN
from megatrain_verl.resources_report import CUDA_CONTEXT, RATES, parse_size, step_seconds
from megatrain_verl.streaming import activations, attention, device_ring, expert_pass, host_store, pass_plan
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.device_plan import device_bytes
from megatrain_verl.streaming.engine import StreamingEngine
from megatrain_verl.streaming.host_memory import HostBuffer
from megatrain_verl.streaming.pass_plan import PassPlanner
from megatrain_verl.streaming.token_head import ScoredTokens, TokenHead

BLOCK = 512  # bytes, to which torch's CUDA allocator rounds up


class Ledger(TorchDispatchMode):
    """Counts the bytes of the meta tensors that operations make while it is active, until nothing refers to them."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self._device = device
        self.current = self.peak = 0
        self._known: set[int] = set()
        self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._counts:
            tree_map_only(Tensor, self._note, result)
        return result

    def uncounted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose own tensors are not on the GPU: copies of modules on the meta device."""

        def call(*args: Any) -> Any:
            self._counts = False
            try:
                return function(*args)
            finally:
                self._counts = True

        return call

    def ignore(self, tensor: Tensor) -> Tensor:
        """A tensor that is not on the GPU: host memory."""
        self._known.add(id(tensor.untyped_storage()))
        return tensor

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != self._device or id(storage) in self._known:
            return
        nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
        self._known.add(id(storage))
        weakref.finalize(storage, self._free, id(storage), nbytes)
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.current -= nbytes


class FlashAttention(torch.autograd.Function):
    """The shapes of a flash-attention kernel: (1, heads, T, D) to (1, T, heads, V), log-sums kept in float32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **unused: object) -> tuple:
    """In place of `packed_attention`."""
    return FlashAttention.apply(query, key, value), None


def all_chunks(
    head: TokenHead, tokens: ScoredTokens, grad_log_probs: Tensor, grad_entropy: Tensor | None, kept: bool
) -> Iterator[ScoredTokens]:
    """In place of the choice of tokens by their gradients, which have no values: all of them."""
    return iter([tokens] if kept else tokens.chunks(head._chunk_tokens))


def equal_parts(index: Tensor, firsts: list[int]) -> list[Tensor]:
    """In place of the choices of experts, which have no values: every part gets as many."""
    choices = torch.arange(index.numel(), device="meta")
    return list(choices.tensor_split(len(firsts)))


@contextmanager
def simulated_gpu(memory: int, ledger: Ledger) -> Iterator[None]:
    """Inside, engines on the device "meta" plan and run as on a GPU with so many bytes."""

    def available(own_bytes: int, utilization: float) -> float:
        free = memory - CUDA_CONTEXT - ledger.current
        return min(free + own_bytes - 0.05 * memory, utilization * memory - (ledger.current - own_bytes))

    class HostBytes(HostBuffer):
        def __init__(self, nbytes: int, label: str, **unused: object) -> None:
            self.nbytes, self.label, self._registered = nbytes, label, False
            self.tensor = ledger.ignore(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (host_store, "HostBuffer", HostBytes),
            (activations, "HostBuffer", HostBytes),
            (pass_plan, "available_bytes", available),
            (TokenHead, "_backward_chunks", all_chunks),
            (expert_pass, "places_by_part", equal_parts),
            (device_ring, "bind", ledger.uncounted(device_ring.bind)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.callback(attention.register)
        yield


def simulate(arguments: argparse.Namespace) -> dict[str, Any]:
    """One step of `rows` rows; figures in bytes, ready for JSON."""
    model = model_config(arguments.model)
    config = StreamingConfig(
        resident_layers=0 if arguments.lean else None,
        checkpoint_interval=arguments.checkpoint_interval,
        expert_parts=arguments.expert_parts,
        host_memory_gb=1e9,
        cpu_threads=1,
    )
    rows = [arguments.row_tokens] * arguments.micro_batch
    positions = torch.arange(arguments.row_tokens).repeat(arguments.micro_batch)
    batches = [MicroBatch(torch.zeros_like(positions), positions, rows)] * (arguments.rows // arguments.micro_batch)
    tokens = arguments.rows * arguments.row_tokens
    ledger = Ledger()
    with simulated_gpu(arguments.gpu_memory, ledger):
        engine = StreamingEngine(model, config, AdamWConfig(), device="meta", keep_reference=arguments.reference)
        AttentionInterface.register(attention.NAME, attend)
        engine.planner = PassPlanner(engine.plan, config, "cuda")
        with ledger:
            engine.forward_backward(batches, lambda index, outputs: -outputs.log_probs.sum() / tokens)
        planned = device_bytes(engine.plan, config, len(positions), tokens)
        beside = {"AdamW staging": planned["AdamW staging"], "CUDA context": CUDA_CONTEXT}
        result = {
            "model": arguments.model,
            "parameters": engine.plan.num_parameters,
            "tokens_per_step": tokens,
            "micro_batch_tokens": len(positions),
            "gpu_bytes": {"tensors of the step, at most": ledger.peak, **beside},
            "gpu_total": ledger.peak + sum(beside.values()),
            "gpu_memory": arguments.gpu_memory,
            "planned_without_kept_inputs": sum(planned.values()) + CUDA_CONTEXT,
            "sent_to_gpu": engine.counters.h2d_bytes,
            "sent_to_host": engine.counters.d2h_bytes,
            "host_bytes": engine.host_plan.bytes_by_kind,
            "host_total": int(MARGIN * engine.host_plan.total),
            "seconds_bound": step_seconds(ModelSizes.of(model), tokens, RATES)["step"],
        }
        engine.streams.close()  # there is no memory to give back
    return result


def as_table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"SIMULATED step of {result['model']}: {result['parameters']:,} parameters",
        f"{result['tokens_per_step']:,} tokens in micro-batches of {result['micro_batch_tokens']:,}",
        *(f"  GPU   {name:<30}{nbytes / GIB:>10.2f} GiB" for name, nbytes in result["gpu_bytes"].items()),
        *(f"  host  {name:<30}{nbytes / GIB:>10.2f} GiB" for name, nbytes in result["host_bytes"].items()),
        f"GPU: {result['gpu_total'] / 1e9:.1f} of {result['gpu_memory'] / 1e9:.0f} GB (resources plans "
        f"{result['planned_without_kept_inputs'] / 1e9:.1f} GB without kept layer inputs)",
        f"host: {result['host_total'] / 1e9:,.0f} GB, with 5% for the process",
        f"transfers of a step: {result['sent_to_gpu'] / 1e9:.0f} GB to the GPU, {result['sent_to_host'] / 1e9:.0f} GB "
        f"back; computed bound {result['seconds_bound']:.1f} s",
    ]
    return "\n".join(lines)


def command_line() -> argparse.ArgumentParser:
    """The options, whose values `simulate` takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a config.json, or a name of benchmarks/shapes.py")
    parser.add_argument("--gpu-memory", type=parse_size, default=parse_size("80GB"))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=2, help="rows")
    parser.add_argument("--checkpoint-interval", type=int, default=1)
    parser.add_argument("--expert-parts", type=int, default=1, help="parts in which experts are streamed")
    parser.add_argument("--reference", action="store_true", help="a reference policy for a KL term")
    parser.add_argument("--lean", action="store_true", help="resident_layers=0: the least memory")
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> None:
    """The command line; exit status 1 if the GPU is too small."""
    arguments = command_line().parse_args()
    result = simulate(arguments)
    print(json.dumps(result, indent=1) if arguments.json else as_table(result))
    raise SystemExit(0 if result["gpu_total"] <= arguments.gpu_memory else 1)


if __name__ == "__main__":
    main()

"""What to change, and by how much, after a pass has run out of device memory."""

import re
from dataclasses import replace

import torch

from megatrain_verl.config import StreamingConfig
from megatrain_verl.resources import GIB
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.device_plan import Sizes, device_bytes, input_bytes
from megatrain_verl.streaming.host_store import DTYPES
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner

REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
LEAST_TOKENS = 64
CUBLAS_WORKSPACE = 32 << 20  # that torch allocates for the stream of the computation


def explain(
    error: torch.OutOfMemoryError,
    sizes: Sizes,
    config: StreamingConfig,
    micro_batches: list[MicroBatch],
    plan: PassPlan | None,
    planner: PassPlanner,
) -> None:
    """Add `advice` as a note to `error`, raised in a pass over `micro_batches` on the current CUDA device.

    To be called before anything is freed. `plan` is that of a training step, None when scoring.
    """
    found = REQUEST.search(str(error))
    if not torch.cuda.is_available() or found is None:
        return
    free, total = torch.cuda.mem_get_info()
    limit = int(min(free + torch.cuda.memory_reserved(), torch.cuda.get_per_process_memory_fraction() * total))
    wanted = torch.cuda.memory_allocated() + int(float(found[1]) * UNITS[found[2]])
    tokens = [batch.num_tokens for batch in micro_batches]
    error.add_note(advice(sizes, config, tokens, plan, wanted, limit, planner.saved_bytes_per_token or 0.0))


def advice(
    sizes: Sizes,
    config: StreamingConfig,
    tokens: list[int],
    plan: PassPlan | None,
    wanted: int,
    limit: int,
    saved_bytes_per_token: float = 0.0,
) -> str:
    """The options that lower the need, each with what it saves, as the lines of a note.

    Args:
        tokens: of each micro-batch.
        plan: of the training step; None when scoring.
        wanted: bytes that were allocated and asked for at the failure.
        limit: bytes that the engine can have.
        saved_bytes_per_token: what a kept layer holds.
    """
    waves = [len(tokens)] if plan is None else list(plan.waves)
    starts = [sum(waves[:number]) for number in range(len(waves))]
    wave = max(sum(tokens[start : start + count]) for start, count in zip(starts, waves, strict=True))
    lines = [f"{wanted / GIB:.2f} GiB of device memory were needed, {limit / GIB:.2f} GiB can be had. What helps:"]
    fixed = _fixed_bytes(sizes, config, plan) + CUBLAS_WORKSPACE
    # A pass may fail early in a layer, long before it has all that it needs.
    planned = sum(_device_bytes(sizes, config, plan, max(tokens), wave).values()) + CUBLAS_WORKSPACE
    needed = max(wanted, planned)
    fitting = _fitting_tokens(max(tokens), needed - fixed, limit - fixed)
    if fitting >= LEAST_TOKENS:
        lines.append(
            f"at most about {fitting} tokens per micro-batch instead of {max(tokens)} (SFT: "
            "data.max_token_len_per_gpu; RL: ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu, or fewer "
            "rows per micro-batch)"
        )
    for option, saved in _savings(sizes, config, plan, max(tokens), wave, saved_bytes_per_token).items():
        if saved >= GIB / 100:
            lines.append(f"{option}: {saved / GIB:.2f} GiB less")
    return "\n  ".join(lines)


def _fixed_bytes(sizes: Sizes, config: StreamingConfig, plan: PassPlan | None) -> int:
    """What no number of tokens changes: weights and gradients on the device."""
    parts = _device_bytes(sizes, config, plan, 0, 0)
    return sum(size for part, size in parts.items() if part != "workspace")


def _device_bytes(
    sizes: Sizes, config: StreamingConfig, plan: PassPlan | None, micro_batch: int, wave: int
) -> dict[str, int]:
    training = plan is not None
    slots = plan.layer_slots if training else 2
    resident = training and plan.resident_gradients
    settings = {"training": training, "layer_slots": slots, "resident_gradients": resident}
    return device_bytes(sizes, config, micro_batch, wave, **settings)


def _fitting_tokens(tokens: int, needed: int, room: int) -> int:
    """Tokens per micro-batch whose activations fit into `room`, if those of `tokens` take `needed` bytes."""
    if needed <= 0 or room <= 0:
        return 0
    # What failed has failed: fragments of free memory can make it fail with room left.
    return min(int(tokens * room / needed), tokens - tokens // 8) // 64 * 64


def _savings(
    sizes: Sizes, config: StreamingConfig, plan: PassPlan | None, micro_batch: int, wave: int, saved: float
) -> dict[str, float]:
    """Bytes that each option would save, by the option."""
    itemsize = DTYPES[config.dtype].itemsize
    chunk = max(128, config.head_chunk_tokens // 2)
    head = (config.head_chunk_tokens - chunk) * sizes.vocab_size * (4 * 4 + itemsize)
    savings: dict[str, float] = {}
    if plan is not None and config.most_resident_layers != 0:
        lean = _fixed_bytes(sizes, replace(config, resident_layers=0), PassPlan(plan.waves))
        kept = micro_batch * sizes.vocab_size * itemsize if plan.keep_logit_gradients else 0
        kept += plan.kept_layers * wave * max(0.0, saved - sizes.hidden_size * itemsize)
        savings["resident_layers=0"] = _fixed_bytes(sizes, config, plan) - lean + kept
    parts = min(2 * config.expert_parts, sizes.separable_experts)
    if parts > config.expert_parts and config.checkpoint_interval == 1:
        lean, split = replace(config, resident_layers=0), replace(config, resident_layers=0, expert_parts=parts)
        before, after = (
            sum(device_bytes(sizes, each, micro_batch, wave, training=plan is not None).values())
            for each in (lean, split)
        )
        savings[f"expert_parts={parts} (with one process; experts of a layer are streamed in parts)"] = before - after
    if plan is not None and plan.input_bytes > 0:
        share = 1 - plan.kept_layers / len(sizes.layer_sizes)
        on_device = min(plan.input_bytes, share * input_bytes(sizes, config, wave))
        savings["device_activation_gb=0 (layer inputs go to page-locked host memory)"] = on_device
    savings[f"head_chunk_tokens={chunk}"] = head
    return savings

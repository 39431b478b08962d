"""What to change, and by how much, after a pass has run out of device memory."""

import re
from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from megatrain_verl.config import StreamingConfig
from megatrain_verl.resources import GIB
from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.device_plan import Sizes, device_bytes, input_bytes
from megatrain_verl.streaming.host_store import DTYPES
from megatrain_verl.streaming.image_memory import ImageBytes
from megatrain_verl.streaming.pass_plan import PassPlan, PassPlanner, wave_sums

REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": GIB}
LEAST_TOKENS = 64
CUBLAS_WORKSPACE = 32 << 20  # that torch allocates for the stream of the computation
# Of the tokens that fit by the count so many are advised: the allocator could not use the last quarter of 1 GiB, in
# pieces, and CUDA's float32 attention makes a layer take 1.3 times the count (tests/gpu/test_out_of_memory.py).
USABLE, USABLE_FLOAT32 = 0.75, 0.58


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
    saved = planner.saved_bytes_per_token or 0.0
    images = planner.image_bytes(micro_batches, training=plan is not None)
    error.add_note(advice(sizes, config, tokens, plan, wanted, limit, saved, images))


def advice(
    sizes: Sizes,
    config: StreamingConfig,
    tokens: list[int],
    plan: PassPlan | None,
    wanted: int,
    limit: int,
    saved_bytes_per_token: float = 0.0,
    images: ImageBytes | None = None,
) -> str:
    """The options that lower the need, each with what it saves, as the lines of a note.

    Args:
        tokens: of each micro-batch.
        plan: of the training step; None when scoring.
        wanted: bytes that were allocated and asked for at the failure.
        limit: bytes that the engine can have.
        saved_bytes_per_token: what a kept layer holds.
        images: what the images of the micro-batches take, if they have any.
    """
    waves = PassPlan((len(tokens),)) if plan is None else plan  # a pass that scores has one
    wave, pixels = max(wave_sums(waves, tokens)), 0 if images is None else max(wave_sums(waves, images.held))
    per_token = 0.0 if images is None else images.encoder / max(tokens)
    failed = PassMemory(sizes, config, plan, max(tokens), wave, saved_bytes_per_token, pixels / wave, per_token)
    lines = [f"{wanted / GIB:.2f} GiB of device memory were needed, {limit / GIB:.2f} GiB can be had. What helps:"]
    fitting = _fitting_tokens(failed, wanted, limit)
    if fitting > 0:
        lines.append(
            f"at most about {fitting} tokens per micro-batch instead of {failed.micro_batch} (SFT: "
            "data.max_token_len_per_gpu; RL: ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu, or fewer "
            "rows per micro-batch)"
        )
    for option, saved in _savings(failed, sum(tokens)).items():
        if saved >= GIB / 100:
            lines.append(f"{option}: {saved / GIB:.2f} GiB less")
    return "\n  ".join(lines)


@dataclass(frozen=True)
class PassMemory:
    """A pass and the sizes on which its device memory depends, in tokens: of the largest micro-batch and wave."""

    sizes: Sizes
    config: StreamingConfig
    plan: PassPlan | None
    micro_batch: int
    wave: int
    saved_bytes_per_token: float
    image_bytes_per_token: float = 0.0
    encoder_bytes_per_token: float = 0.0

    def parts(self) -> dict[str, float]:
        """Bytes on the device by part. A smaller micro-batch changes no part that depends on the wave alone."""
        training = self.plan is not None
        plan = self.plan if training else PassPlan(())
        settings = {"layer_slots": plan.layer_slots, "resident_gradients": plan.resident_gradients}
        settings["image_bytes"] = int(self.image_bytes_per_token * self.wave)
        settings["encoder_bytes"] = int(self.encoder_bytes_per_token * self.micro_batch)
        parts = device_bytes(self.sizes, self.config, self.micro_batch, self.wave, training=training, **settings)
        row = self.sizes.hidden_size * DTYPES[self.config.dtype].itemsize
        kept = plan.kept_layers if training else 0
        if training:
            share = 1 - kept / len(self.sizes.layer_sizes)
            parts["layer inputs"] = min(plan.input_bytes, share * input_bytes(self.sizes, self.config, self.wave))
        parts["kept layers"] = kept * self.wave * max(self.saved_bytes_per_token, row)
        logits = self.micro_batch * self.sizes.vocab_size * DTYPES[self.config.dtype].itemsize
        parts["kept logits"] = logits if plan.keep_logit_gradients else 0
        return parts

    def needed(self) -> float:
        """Bytes on the device, with what cuBLAS takes."""
        return sum(self.parts().values()) + CUBLAS_WORKSPACE


def _fitting_tokens(failed: PassMemory, wanted: int, limit: int) -> int:
    """Tokens per micro-batch with which the pass fits into `limit`, where `wanted` bytes were not enough; 0: none."""
    tokens = failed.micro_batch
    # A pass may fail early in a layer, long before it has all that it needs. What it wanted beyond what is counted
    # here is taken for the micro-batch's.
    uncounted = max(0.0, wanted - failed.needed())

    def needed(fewer: int) -> float:
        return replace(failed, micro_batch=fewer).needed() + uncounted * fewer / tokens

    # What failed has failed: fragments of free memory can make it fail with room left.
    candidates = range(LEAST_TOKENS, tokens - tokens // 8 + 1, 64)
    fitting = bisect_right(candidates, limit, key=needed)
    usable = USABLE_FLOAT32 if failed.config.dtype == "float32" else USABLE
    advised = int(usable * candidates[fitting - 1]) // 64 * 64 if fitting else 0
    return advised if advised >= LEAST_TOKENS else 0


def _savings(failed: PassMemory, tokens: int) -> dict[str, float]:
    """Bytes that each option would save in a pass over `tokens` in all, by the option."""
    sizes, config, plan = failed.sizes, failed.config, failed.plan
    options: dict[str, PassMemory] = {}
    lean = replace(failed, config=replace(config, resident_layers=0))
    if plan is not None:
        # Without resident gradients the micro-batches run in one wave, unless the user wants several.
        wave = failed.wave if config.wave_tokens else tokens
        lean = replace(lean, wave=wave, plan=PassPlan((1,), input_bytes=failed.parts()["layer inputs"]))
        if config.most_resident_layers != 0:
            options["resident_layers=0"] = lean
    parts = min(2 * config.expert_parts, sizes.separable_experts)
    if parts > config.expert_parts and config.checkpoint_interval == 1:
        split = replace(lean, config=replace(lean.config, expert_parts=parts))
        options[f"expert_parts={parts} (with one process; experts of a layer are streamed in parts)"] = split
    if plan is not None:
        spilled = replace(failed, plan=replace(plan, input_bytes=0))
        options["device_activation_gb=0 (layer inputs go to page-locked host memory)"] = spilled
    half = failed.wave // 2
    if half >= failed.micro_batch:  # else smaller micro-batches come first
        fewer = "fewer rows at a time (data.train_batch_size)"
        waves = (
            f"wave_tokens={half} (gradients are added on the host, in bfloat16 with 2 more bytes per parameter there)"
        )
        options[fewer if plan is None else waves] = replace(failed, wave=half)
    chunk = max(128, config.head_chunk_tokens // 2)
    options[f"head_chunk_tokens={chunk}"] = replace(failed, config=replace(config, head_chunk_tokens=chunk))
    return {option: failed.needed() - changed.needed() for option, changed in options.items()}

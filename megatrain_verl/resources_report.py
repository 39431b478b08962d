"""`python -m megatrain_verl.resources`: does a model fit, on which host, with which batch, at which speed.

Seconds are computed from the bounds of the layer-major order (docs/experiments.md has measured ones), everything else
from the same plan that the engine checks when it starts.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from transformers import AutoConfig, LlamaConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatrain_verl.config import LoraSettings, StreamingConfig
from megatrain_verl.model_sizes import ModelSizes
from megatrain_verl.resources import GIB, MARGIN, HostPlan
from megatrain_verl.streaming.device_plan import Rates, device_bytes, input_bytes
from megatrain_verl.streaming.model_plan import VERIFIED_MODEL_TYPES

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
RATES = Rates()
NAMES = {"gpu": "GPU", "host": "host"}
FITS = {True: "yes", False: "NO", None: "depends on --host-memory"}
LLAMA_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA_OPTIONS = ("num_key_value_heads", "tie_word_embeddings")
CUDA_CONTEXT = 1 << 30  # the context, and what a sleeping vLLM keeps
VLLM_ASLEEP = 2 << 30


def parse_size(text: str) -> int:
    """Bytes of "80GB", "512 GiB" or a plain number.

    Raises:
        ValueError: anything else.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size; write 80GB, 512GiB or a number of bytes")
    return int(float(found[1]) * UNITS[found[2].upper()])


def read_sizes(model: str, lora: LoraSettings | None = None) -> tuple[ModelSizes, str]:
    """Sizes and model_type of a folder, a config.json or a name that the hub or its local cache knows.

    A family that brings its own code (Baichuan, InternLM2) is sized as the Llama whose shape its config describes.

    Raises:
        ValueError: there is no config, or neither transformers nor Llama's fields describe the model.
    """
    try:
        fields, _ = PretrainedConfig.get_config_dict(model)
        if not fields:
            raise OSError("the file does not exist or is empty")
    except OSError as error:
        raise ValueError(f"no config.json for {model!r}: give a folder, a file or a hub name ({error})") from error
    model_type = str(fields.get("model_type"))
    if model_type in CONFIG_MAPPING:
        return ModelSizes.of(AutoConfig.from_pretrained(model), lora), model_type
    if absent := [name for name in LLAMA_SHAPE if name not in fields]:
        raise ValueError(
            f"transformers does not know model_type {model_type!r} of {model!r}, and its config is not a Llama's "
            f"either: it has no {', '.join(absent)}"
        )
    shape = {name: fields[name] for name in (*LLAMA_SHAPE, *LLAMA_OPTIONS) if name in fields}
    return ModelSizes.of(LlamaConfig(**shape), lora), model_type


def report(arguments: argparse.Namespace, rates: Rates = RATES) -> dict[str, object]:
    """All figures, ready for JSON."""
    modules = [name.strip() for name in arguments.lora_target_modules.split(",")]
    # One name alone would be a regular expression to peft.
    target = "all-linear" if modules == ["all-linear"] else modules
    lora = LoraSettings(arguments.lora_rank, target_modules=target) if arguments.lora_rank else None
    sizes, model_type = read_sizes(arguments.model, lora)
    if arguments.expert_parts > max(1, sizes.separable_experts):
        found = f"{sizes.separable_experts or 'no'} experts that can be streamed apart"
        raise ValueError(f"--expert-parts {arguments.expert_parts}: a layer of this model has {found}")
    options = {"checkpoint_interval": arguments.checkpoint_interval, "expert_parts": arguments.expert_parts}
    if arguments.reference_folder is not None:
        if lora is not None:
            raise ValueError("--reference-folder: with LoRA the model without adapters is the reference")
        options["reference_folder"] = arguments.reference_folder
    config = StreamingConfig(dtype=arguments.dtype, **options)
    reference = arguments.reference or arguments.reference_folder is not None
    # Without its adapters the model is the reference.
    host = HostPlan.of(sizes, config, trainable=True, reference=reference and lora is None)
    batch = plan_batch(sizes, config, arguments)
    gpu = device_bytes(sizes, config, batch["micro_batch_tokens"], batch["tokens_per_step"]) | {
        "CUDA context": CUDA_CONTEXT
    }
    if arguments.rollout == "vllm":
        gpu["vLLM asleep"] = VLLM_ASLEEP
    fits_gpu = sum(gpu.values()) <= arguments.gpu_memory
    host_needed = math.ceil(host.total * MARGIN)
    fits_host = None if arguments.host_memory is None else host_needed <= arguments.host_memory
    result = {
        "model": arguments.model,
        "model_type": model_type,
        "trained_by_this_version": model_type in VERIFIED_MODEL_TYPES,
        "parameters": sizes.num_parameters,
        "active_parameters": sizes.active_parameters,
        "trained_parameters": sum(sizes.trained_sizes),
        "host_bytes": host.bytes_by_kind | {"total": host.total, "with_margin": host_needed},
        "gpu_bytes": gpu | {"total": sum(gpu.values())},
        "batch": batch,
        "seconds_per_step": step_seconds(sizes, batch["tokens_per_step"], rates),
        "rates": asdict(rates),
        "fits": {"gpu": fits_gpu, "host": fits_host},
        "what_to_change": [],
    }
    if arguments.rollout == "vllm":
        result["vllm_weight_bytes"] = 2 * sizes.num_parameters
    result["what_to_change"] = list(_advice(result, host, arguments, config, sizes))
    return result


def plan_batch(sizes: ModelSizes, config: StreamingConfig, arguments: argparse.Namespace) -> dict[str, int]:
    """Tokens per micro-batch and per step: those asked for, or what fits and enough to hide the transfers."""
    fixed = device_bytes(sizes, config, 0, 0)
    room = arguments.gpu_memory - sum(fixed.values()) - CUDA_CONTEXT
    room -= VLLM_ASLEEP if arguments.rollout == "vllm" else 0
    length = arguments.seq_len
    rows = max(1, 8192 // length)
    while rows > 1 and _moving_bytes(sizes, config, rows * length, rows * length) > room / 2:
        rows //= 2
    micro_batch = arguments.micro_batch_tokens or rows * length
    hide = RATES.matmul / RATES.transfer  # tokens whose forward arithmetic takes as long as the transfer
    step = arguments.tokens_per_step or math.ceil(2 * hide / micro_batch) * micro_batch
    left = max(0, room - _moving_bytes(sizes, config, micro_batch, step))
    kept = input_bytes(sizes, config, length)
    on_gpu = left // kept * length
    return {
        "sequence_tokens": length,
        "micro_batch_tokens": micro_batch,
        "tokens_per_step": step,
        "tokens_kept_on_gpu": on_gpu,
        "kept_bytes_per_sequence": kept,
        "spilled_bytes": math.ceil(max(0, step - on_gpu) / length * kept),
    }


def step_seconds(sizes: ModelSizes, tokens: int, rates: Rates) -> dict[str, float]:
    """Bounds: forward and backward, each the larger of arithmetic and transfers, and what AdamW adds to the forward."""
    weights, head = 2 * sum(sizes.unit_sizes), sizes.head_parameters
    active = sizes.active_layer_parameters
    forward = max(2 * (active + head) * tokens / rates.matmul, weights / rates.transfer)
    backward = max((6 * active + 4 * head) * tokens / rates.matmul, weights / rates.transfer)
    adamw = sum(sizes.trained_sizes) / rates.adamw
    return {"forward": forward, "backward": backward, "adamw": adamw, "step": max(forward, adamw) + backward}


def _moving_bytes(sizes: ModelSizes, config: StreamingConfig, micro_batch: int, step: int) -> int:
    parts = device_bytes(sizes, config, micro_batch, step)
    return parts["workspace"] + parts["hidden states"] + parts["recomputed inputs"] + parts.get("inputs of experts", 0)


def _more_parts(result: dict, room: int, config: StreamingConfig, sizes: ModelSizes) -> Iterator[str]:
    """What the engine needs of `room` bytes with the first number of parts with which it fits, or the largest."""
    tokens = result["batch"]["micro_batch_tokens"], result["batch"]["tokens_per_step"]
    parts = 2 * config.expert_parts
    while parts <= sizes.separable_experts and config.checkpoint_interval == 1:
        needed = sum(device_bytes(sizes, replace(config, resident_layers=0, expert_parts=parts), *tokens).values())
        if needed <= room or 2 * parts > sizes.separable_experts:
            yield f"GPU memory: with expert_parts={parts} the engine needs {needed / GIB:.1f} of {room / GIB:.1f} GiB"
            return
        parts *= 2


def _advice(
    result: dict, host: HostPlan, arguments: argparse.Namespace, config: StreamingConfig, sizes: ModelSizes
) -> Iterator[str]:
    if result["model_type"] not in CONFIG_MAPPING:
        yield f"transformers has no model_type {result['model_type']}: the figures are those of a Llama of its shape"
    if not result["trained_by_this_version"]:
        yield (
            f"model_type {result['model_type']} is not trained by this version (it trains "
            f"{', '.join(VERIFIED_MODEL_TYPES)}); the figures are a plan"
        )
    if result["fits"]["host"] is False:
        missing = result["host_bytes"]["with_margin"] - arguments.host_memory
        yield f"host memory: {missing / GIB:.1f} GiB more are needed"
        if "reference" in host.bytes_by_kind:
            yield f"without a KL term: {host.bytes_by_kind['reference'] / GIB:.1f} GiB less host memory"
        if "reference" in host.bytes_by_kind and config.expert_parts == 1:
            in_file = replace(config, reference_folder=".")
            less = host.total - HostPlan.of(sizes, in_file, trainable=True, reference=True).total
            yield f"with reference_folder, one GPU: {less / GIB:.1f} GiB less host memory"
    if host.file_bytes:
        yield f"reference_folder: {host.file_bytes / GIB:.1f} GiB on the disk, which every reference pass reads"
    if not result["fits"]["gpu"]:
        others = sum(result["gpu_bytes"].get(part, 0) for part in ("CUDA context", "vLLM asleep"))
        yield from _more_parts(result, arguments.gpu_memory - others, config, sizes)
        yield "GPU memory: lower --seq-len or head_chunk_tokens; slots and accumulators follow from the largest layer"
    if result.get("vllm_weight_bytes", 0) > arguments.gpu_memory:
        yield f"vLLM awake: {result['vllm_weight_bytes'] / 1e9:,.0f} GB of bfloat16 weights do not fit on the GPU"
    if spilled := result["batch"]["spilled_bytes"]:
        # Experts in parts need every layer's input.
        interval = f"; checkpoint_interval={2 * config.checkpoint_interval} halves them"
        yield (
            f"kept layer inputs: {spilled / GIB:.1f} GiB of a step go to host memory beside the plan"
            f"{interval if config.expert_parts == 1 else ''}"
        )


def as_table(result: dict) -> str:
    """The report for people."""

    def part(title: str, values: dict[str, int]) -> list[str]:
        return [title, *(f"  {name:<24}{value / GIB:>10.2f} GiB" for name, value in values.items()), ""]

    batch, seconds = result["batch"], result["seconds_per_step"]
    lines = [
        f"{result['model']} ({result['model_type']}): {result['parameters']:,} parameters, "
        f"{result['active_parameters']:,} of them active per token",
        "",
        *part("host memory", result["host_bytes"]),
        *part("GPU memory, kept layer inputs apart", result["gpu_bytes"]),
        f"micro-batch {batch['micro_batch_tokens']:,} tokens, step {batch['tokens_per_step']:,} tokens or more; inputs "
        f"of {batch['tokens_kept_on_gpu']:,} tokens stay on the GPU",
        f"computed bound of such a step: {seconds['step']:.2f} s (forward {seconds['forward']:.2f}, backward "
        f"{seconds['backward']:.2f}, AdamW {seconds['adamw']:.2f} under the forward pass)",
        "fits: " + ", ".join(f"{NAMES[place]} {FITS[answer]}" for place, answer in result["fits"].items()),
        f"needs: a host with {result['host_bytes']['with_margin'] / 1e9:,.0f} GB of free memory, a GPU with "
        f"{result['gpu_bytes']['total'] / 1e9:,.0f} GB",
        *(f"- {advice}" for advice in result["what_to_change"]),
    ]
    return "\n".join(lines)


def command_line() -> argparse.ArgumentParser:
    """The options, whose values `report` takes."""
    parser = argparse.ArgumentParser(prog="python -m megatrain_verl.resources", description=__doc__)
    parser.add_argument("--model", required=True, help="folder, config.json or hub name")
    parser.add_argument("--gpu-memory", type=_size, default=parse_size("80GB"), help="default: 80GB")
    parser.add_argument("--host-memory", type=_size, help="default: only say what is needed")
    parser.add_argument("--seq-len", type=_tokens, default=2048, help="tokens of the longest sequence (2048)")
    parser.add_argument("--micro-batch-tokens", type=_tokens, help="default: what fits")
    parser.add_argument("--tokens-per-step", type=_tokens, help="default: enough to hide the transfers")
    parser.add_argument("--rollout", choices=("vllm", "none"), default="none", help="what shares the GPU")
    parser.add_argument("--reference", action="store_true", help="a reference policy for a KL term")
    parser.add_argument("--reference-folder", help="the reference policy in a file there, not in host memory")
    parser.add_argument("--lora-rank", type=int, default=0, help="train LoRA adapters of this rank only")
    parser.add_argument("--lora-target-modules", default="all-linear", help="or names, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights on the GPU: bfloat16 (default) or float32")
    parser.add_argument("--checkpoint-interval", type=int, default=1, help="layers from one kept input to the next")
    parser.add_argument("--expert-parts", type=int, default=1, help="parts in which experts are streamed")
    parser.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:  # whose text argparse would drop
        raise argparse.ArgumentTypeError(str(error)) from error


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write a whole number from 1 on")
    return int(text)


def main() -> None:
    """The command line; exit status 1 if the model does not fit."""
    parser = command_line()
    arguments = parser.parse_args()
    if arguments.model.endswith("config.json"):
        arguments.model = str(Path(arguments.model).parent)
    try:
        result = report(arguments)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(result, indent=1) if arguments.json else as_table(result))
    raise SystemExit(1 if False in result["fits"].values() else 0)

"""Device memory by part: what the engine holds there, from the model's shapes and the settings."""

import math
from dataclasses import dataclass
from typing import Protocol

from megatrain_verl.config import StreamingConfig
from megatrain_verl.streaming.device_adamw import CHUNK_ELEMENTS
from megatrain_verl.streaming.gradients import STAGING_ELEMENTS
from megatrain_verl.streaming.host_store import DTYPES, arena_dtypes
from megatrain_verl.streaming.streams import LANES


@dataclass(frozen=True)
class Rates:
    """Of the machine: bytes/s over PCIe, FLOP/s of bfloat16 products, parameters/s of the host AdamW.

    Measured on an H200 with 16 cores; the matrix product while both copy engines are busy.
    """

    transfer: float = 50e9
    matmul: float = 730e12
    adamw: float = 4.5e9


class Sizes(Protocol):
    """What planning needs of a model: elements per layer, of the experts in it, of embedding, head and vision part, and
    of the largest of these in each device slot; the trained ones; how many experts of a layer can be streamed apart;
    whether embedding and head are one; parameters of all layers that a token passes; widths.
    """

    layer_sizes: tuple[int, ...]
    edge_sizes: tuple[int, ...]
    expert_sizes: tuple[int, ...]
    trained_layer_sizes: tuple[int, ...]
    trained_edge_sizes: tuple[int, ...]
    trained_expert_sizes: tuple[int, ...]
    separable_experts: int
    slot_sizes: dict[str, int]
    trained_slot_sizes: dict[str, int]
    tied: bool
    active_layer_parameters: int
    hidden_size: int
    intermediate_size: int
    experts_per_token: int
    vocab_size: int


def device_bytes(
    sizes: Sizes,
    config: StreamingConfig,
    micro_batch_tokens: int,
    pass_tokens: int,
    *,
    training: bool = True,
    layer_slots: int = 2,
    resident_gradients: bool = False,
    image_bytes: int = 0,
    encoder_bytes: int = 0,
) -> dict[str, int]:
    """Bytes on the device by part, without the kept layer inputs (see `input_bytes`); by default in lean mode.

    `pass_tokens` go through the layers together, in micro-batches of at most `micro_batch_tokens`. Between two layers
    each micro-batch has its hidden state or its gradient. `recomputed inputs` are those of a segment's other layers
    when checkpoint_interval is above 1. `workspace` is the largest of one layer's recompute and backward over a
    micro-batch, one chunk of the head, and `encoder_bytes`; `images` are `image_bytes` (both of `ImageSizes`).
    """
    itemsize = DTYPES[config.dtype].itemsize
    layer, experts = _pieces(sizes, config.expert_parts)
    compact = config.most_resident_layers == 0 and not sizes.tied  # embedding and head lie over the layers

    def with_others(layers: int, slots: dict[str, int]) -> int:
        edge, apart = slots["edge"], sum(slots.values()) - slots["edge"]
        return (max(layers, edge) if compact else layers + edge) + apart

    parts = {"weight slots": itemsize * with_others(layer_slots * layer + 2 * experts, sizes.slot_sizes)}
    if training:
        trained_layer, trained_slots = _largest_trained(sizes, config.expert_parts), sizes.trained_slot_sizes
        largest = max(trained_layer, *trained_slots.values())
        everything = sum(sizes.trained_layer_sizes) + sum(sizes.trained_edge_sizes)
        accumulated = everything if resident_gradients else with_others(2 * trained_layer, trained_slots)
        parts["gradient accumulators"] = 4 * accumulated
        if config.host_grad_dtype != "float32":
            parts["gradient staging"] = itemsize * min(STAGING_ELEMENTS, largest)
        if config.device_adamw is not False:
            elements = min(CHUNK_ELEMENTS, max(*sizes.trained_layer_sizes, *trained_slots.values()))
            state = arena_dtypes(config, trainable=True, reference=False)
            parts["AdamW staging"] = LANES * elements * sum(dtype.itemsize for dtype in state.values())
    row = sizes.hidden_size * itemsize
    if experts:
        # What the experts get; float32 sums of what they return, or of the gradients of what they get.
        parts["inputs of experts"] = pass_tokens * (row + 4 * sizes.hidden_size)
    parts["hidden states"] = (pass_tokens + micro_batch_tokens) * row
    if training:
        parts["recomputed inputs"] = (config.checkpoint_interval - 1) * pass_tokens * row
    if image_bytes > 0:
        parts["images"] = image_bytes
    decoder = _layer_workspace(sizes, config, micro_batch_tokens, training)
    parts["workspace"] = max(decoder, _head_workspace(sizes, config, itemsize), encoder_bytes)
    return parts


def _pieces(sizes: Sizes, parts: int, *, trained: bool = False) -> tuple[int, int]:
    """Elements of the largest layer and 0; with several parts, of the largest dense part and of the largest other."""
    layers, experts = sizes.layer_sizes, sizes.expert_sizes
    if trained:
        layers, experts = sizes.trained_layer_sizes, sizes.trained_expert_sizes
    if parts == 1:
        return max(layers), 0
    dense = max(layer - inside for layer, inside in zip(layers, experts, strict=True))
    return dense, max(experts) // sizes.separable_experts * math.ceil(sizes.separable_experts / parts)


def _largest_trained(sizes: Sizes, parts: int) -> int:
    return max(_pieces(sizes, parts, trained=True))


def input_bytes(sizes: Sizes, config: StreamingConfig, tokens: int) -> int:
    """Bytes of the layer inputs that a training step of `tokens` keeps, on the device or spilled to the host."""
    kept = math.ceil(len(sizes.layer_sizes) / config.checkpoint_interval)
    return kept * tokens * sizes.hidden_size * DTYPES[config.dtype].itemsize


def _layer_workspace(sizes: Sizes, config: StreamingConfig, tokens: int, training: bool) -> int:
    # Tensors that one decoder layer holds at once per token, in units of the hidden and intermediate size: counted in
    # the transformers layers of Llama and Qwen with SDPA, rounded up.
    hidden, intermediate = sizes.hidden_size, sizes.intermediate_size
    per_token = 16 * hidden + 8 * intermediate if training else 6 * hidden + 3 * intermediate
    # A mixture holds a row for each expert of a token: gathered inputs, outputs, weighted outputs, and in training the
    # gradient of each.
    per_token += (6 if training else 3) * sizes.experts_per_token * hidden
    returned = _largest_trained(sizes, config.expert_parts) if training else 0  # the gradients autograd returns
    return DTYPES[config.dtype].itemsize * (tokens * per_token + returned)


def _head_workspace(sizes: Sizes, config: StreamingConfig, itemsize: int) -> int:
    # Logits, log-probabilities, probabilities and their gradient in float32, and the gradient in the compute type.
    return config.head_chunk_tokens * sizes.vocab_size * (4 * 4 + itemsize)

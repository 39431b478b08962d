"""What a decoder hands to its layers besides the hidden state, taken from the decoder's own forward function.

The decoder runs without its weights: recorders stand for its layers, note the keyword arguments of their call and pass
the hidden state on. So rotary embeddings, positions and the kind of mask of every layer are the family's own, and
nothing here knows a family. Masks are never built: see `attention.py`.
"""

import copy
import inspect
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from megatrain_verl.streaming.attention import MaskKind

# Kinds of rotary embedding whose frequencies follow from the longest position of a call.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
PROBE = "megatrain_mask_kind"  # an attention implementation whose "masks" are descriptions


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of `model` that holds the embedding and the decoder layers."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else decoder.model  # of Llama 4 it is a model with its head


class LayerRecorder(nn.Module):
    """Stands for a decoder layer, with its plain attributes (the decoder may ask for a layer's type)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        self._signature = inspect.signature(layer.forward)
        self.arguments: dict[str, object] = {}

    def forward(self, hidden_states: Tensor, *arguments: object, **named: object) -> Tensor:
        bound = self._signature.bind(hidden_states, *arguments, **named).arguments
        variadic = next((p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        first, *_ = bound
        self.arguments = {**bound, **bound.get(variadic, {})}
        for name in (first, variadic):
            self.arguments.pop(name, None)
        return hidden_states


class DecoderSkeleton:
    """A decoder without weights on `device`, with real rotary embeddings.

    Args:
        decoder: from the meta device; it is not changed.
        device: where the arguments are needed.
    """

    def __init__(self, decoder: nn.Module, device: str) -> None:
        self._device = device
        self._recorders = [LayerRecorder(layer) for layer in decoder.layers]
        self._rest = {
            name: partial(type(module), config=module.config)
            for name, module in decoder.named_children()
            if name not in ("layers", "norm", "embed_tokens")
        }
        self._decoder = copy.copy(decoder)
        self._decoder._modules = {"layers": nn.ModuleList(self._recorders), "norm": nn.Identity()}
        self._make_rest()
        kinds = [getattr(module, "rope_type", "") for module in self._decoder._modules.values()]
        kinds = {kind for kind in kinds for kind in (kind.values() if isinstance(kind, dict) else [kind])}
        self._looks_at_length = bool(kinds & LENGTH_DEPENDENT_ROPE)

    @torch.no_grad()
    def arguments(self, position_ids: Tensor, row_lengths: list[int], dtype: torch.dtype) -> list[dict[str, object]]:
        """Keyword arguments of each layer for tokens at `position_ids` (1, T), rotary embeddings in `dtype`."""
        if not self._looks_at_length:
            return self._record(position_ids, dtype)
        rows = []
        for positions in position_ids.split(row_lengths, dim=-1):
            self._make_rest()  # transformers' dynamic frequencies depend on the rows before: here each row is the first
            rows.append(self._record(positions, dtype))
        joined: dict[tuple[int, ...], object] = {}  # layers get the same tensors: they are joined once
        arguments = []
        for layers in zip(*rows, strict=True):
            parts = {name: [layer[name] for layer in layers] for name in layers[0]}
            keys = {name: tuple(map(id, values)) for name, values in parts.items()}
            for name, key in keys.items():
                if key not in joined:
                    joined[key] = _join(parts[name])
            arguments.append({name: joined[key] for name, key in keys.items()})
        return arguments

    def _make_rest(self) -> None:
        """New rotary embeddings, and whatever else stands beside the layers."""
        with torch.device(self._device):
            self._decoder._modules.update({name: make() for name, make in self._rest.items()})

    def _record(self, position_ids: Tensor, dtype: torch.dtype) -> list[dict[str, object]]:
        # Nothing but the shape, the type and the device of the hidden state is looked at.
        hidden = torch.empty(1, 1, 1, dtype=dtype, device=self._device).expand(1, position_ids.shape[-1], 1)
        self._decoder(inputs_embeds=hidden, position_ids=position_ids, use_cache=False)
        return [recorder.arguments for recorder in self._recorders]

    @torch.no_grad()
    def first_hidden(self, embeddings: Tensor) -> Tensor:
        """(1, T, H) hidden state that reaches the first layer for the output `embeddings` of the embedding."""
        return self._decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state

    def mask_kinds(self) -> list[MaskKind]:
        """Which tokens each layer may attend to.

        Raises:
            ValueError: a mask that is none of causal, sliding window and chunks.
        """
        AttentionMaskInterface.register(PROBE, _describe_mask)
        real = self._decoder.config
        self._decoder.config = copy.copy(real)
        self._decoder.config._attn_implementation_internal = PROBE
        try:
            self.first_hidden(torch.zeros(1, 2, 1, device=self._device))
        finally:
            self._decoder.config = real
        masks = [recorder.arguments.get("attention_mask") or MaskKind() for recorder in self._recorders]
        for mask in masks:
            if not isinstance(mask, MaskKind):
                raise ValueError(f"{type(self._decoder).__name__} makes masks of its own; they are not supported")
        return masks


def _join(values: list[object]) -> object:
    """The rows' values of one argument as that of the pack; tensors are (1, T, ...)."""
    if isinstance(values[0], Tensor):
        return torch.cat(values, dim=1)
    if isinstance(values[0], tuple):
        return tuple(_join(list(parts)) for parts in zip(*values, strict=True))
    return values[0]


def embedding_scale(model: PreTrainedModel) -> float:
    """The factor by which the decoder multiplies the rows of its embedding; 1 in most families.

    Raises:
        ValueError: the first layer gets something else than a multiple of the rows.
    """
    decoder = decoder_of(model)
    embedding = copy.copy(decoder.embed_tokens)
    embedding.padding_idx = None
    embedding._buffers = {name: torch.empty_like(value, device="cpu") for name, value in embedding._buffers.items()}
    width = decoder.embed_tokens.weight.shape[1]
    embedding._parameters = {"weight": nn.Parameter(torch.zeros(2, width), requires_grad=False)}
    model._init_weights(embedding)  # sets the buffers too, as `from_pretrained` does
    rows = torch.stack([torch.ones(width), torch.linspace(-1.5, 1.7, width)])
    embedding.weight.copy_(rows)
    hidden = DecoderSkeleton(decoder, "cpu").first_hidden(embedding(torch.arange(2))[None])[0]
    scale = hidden[0, 0]
    if not torch.equal(rows * scale, hidden):
        raise ValueError(f"{type(model).__name__} does more to its embedding than to scale it; this is not supported")
    return scale.item()


def _describe_mask(*, mask_function, local_size: int | None = None, **unused: object) -> MaskKind:  # noqa: ANN001
    """In place of a mask: what `mask_function` (batch, head, query, key) allows, tried at the edges of `local_size`."""

    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    size = local_size or 1
    if sees(0, 1) or not sees(size, size):
        raise ValueError("the model's attention is not causal; this is not supported")
    if local_size is None:
        return MaskKind()
    if sees(size, 1) and not sees(size, 0):
        return MaskKind(window=size)
    if sees(2 * size - 1, size) and not sees(size, size - 1):
        return MaskKind(chunk=size)
    raise ValueError(f"the model's attention mask of size {size} is neither a sliding window nor chunks")

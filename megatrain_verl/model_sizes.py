"""Sizes of a model from its config.json alone, for planning: any family that transformers knows."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from megatrain_verl.config import LoraSettings
from megatrain_verl.streaming.adapters import Adapters
from megatrain_verl.streaming.expert_parts import separable_experts
from megatrain_verl.streaming.layer_arguments import decoder_of

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")


@dataclass(frozen=True)
class ModelSizes:
    """Counts in elements: `layer_sizes` of the decoder layers, `unit_sizes` of everything that is streamed."""

    num_parameters: int
    # Parameters that one token passes: of a mixture of experts only the chosen ones.
    active_parameters: int
    active_layer_parameters: int
    layer_sizes: tuple[int, ...]
    # Embedding, and the output matrix with the final norm; a tied matrix counts once. Vision towers and the like too.
    edge_sizes: tuple[int, ...]
    head_parameters: int
    hidden_size: int
    intermediate_size: int
    # Experts that a token is sent to; 0 in a dense model.
    experts_per_token: int
    vocab_size: int
    tied: bool
    # Of `layer_sizes` and `edge_sizes`, what is trained.
    trained_layer_sizes: tuple[int, ...]
    trained_edge_sizes: tuple[int, ...]
    # Of `layer_sizes`, the routed experts; 0 in a dense layer.
    expert_sizes: tuple[int, ...]
    trained_expert_sizes: tuple[int, ...]
    # Experts of a layer that can be streamed in parts; 0 if there are none.
    separable_experts: int

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        return (*self.layer_sizes, *self.edge_sizes)

    @property
    def early_units(self) -> list[int]:
        """As `ModelPlan.early_units`. A vision tower counts as a part of the head."""
        head = [] if self.tied else [len(self.unit_sizes) - 1]
        return [*head, *reversed(range(len(self.layer_sizes)))]

    @property
    def trained_sizes(self) -> tuple[int, ...]:
        return (*self.trained_layer_sizes, *self.trained_edge_sizes)

    @property
    def slot_sizes(self) -> dict[str, int]:
        return {"edge": max(self.edge_sizes)}

    @property
    def trained_slot_sizes(self) -> dict[str, int]:
        return {"edge": max(self.trained_edge_sizes)}

    @classmethod
    def of(cls, config: PretrainedConfig, lora: LoraSettings | None = None) -> "ModelSizes":
        """Count the model of `config`, built on the meta device, and with `lora` its adapters, which alone are trained.

        Raises:
            ValueError: transformers cannot build it as a decoder, or these adapters are not supported.
        """
        model = _build(config)
        if lora is not None:
            Adapters.add(model, lora)
        text = config.get_text_config()
        layers = decoder_of(model).layers
        embedding = model.get_input_embeddings().weight
        output = model.get_output_embeddings()
        head = embedding if output is None else output.weight
        share = expert_share(text)
        active_layers = sum(active_parameters(layer, share) for layer in layers)
        layer_sizes = tuple(_count(layer) for layer in layers)
        trained = tuple(_count(layer, trained=True) for layer in layers)
        total = _count(model)
        others = total - sum(layer_sizes) - embedding.numel()
        trained_embedding = embedding.numel() if embedding.requires_grad else 0
        return cls(
            num_parameters=total,
            active_parameters=total - sum(layer_sizes) + active_layers,
            active_layer_parameters=active_layers,
            layer_sizes=layer_sizes,
            edge_sizes=(embedding.numel(), others),
            head_parameters=head.numel(),
            hidden_size=text.hidden_size,
            intermediate_size=intermediate_size(text),
            experts_per_token=experts_per_token(text),
            vocab_size=text.vocab_size,
            tied=head is embedding,
            trained_layer_sizes=trained,
            trained_edge_sizes=(
                trained_embedding,
                _count(model, trained=True) - sum(trained) - trained_embedding,
            ),
            expert_sizes=tuple(_count_experts(layer) for layer in layers),
            trained_expert_sizes=tuple(_count_experts(layer, trained=True) for layer in layers),
            separable_experts=separable_experts(layers),
        )


def _count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)


def _count_experts(layer: nn.Module, *, trained: bool = False) -> int:
    experts = (parameter for name, parameter in layer.named_parameters() if in_experts(name))
    return sum(parameter.numel() for parameter in experts if parameter.requires_grad or not trained)


def _build(config: PretrainedConfig) -> nn.Module:
    autos = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if hasattr(config, "vision_config"):  # some families have a class for their text alone, too
        autos.reverse()
    for auto in autos:
        if type(config) in auto._model_mapping:
            with torch.device("meta"):
                return auto.from_config(config)
    raise ValueError(f"transformers has no decoder for model_type {config.model_type!r}")


def in_experts(name: str) -> bool:
    """Whether a parameter of this name in its layer is one of the routed experts: modules called `experts`."""
    return ".experts." in f".{name}"


def num_experts(text: PretrainedConfig) -> int:
    """Routed experts of a mixture layer; 0 in a dense model."""
    return next((getattr(text, name) for name in EXPERT_COUNTS if getattr(text, name, None)), 0)


def expert_share(text: PretrainedConfig) -> float:
    """The part of the experts that a token passes; 1 for a dense model."""
    experts, chosen = num_experts(text), experts_per_token(text)
    return chosen / experts if experts and chosen else 1.0


def experts_per_token(text: PretrainedConfig) -> int:
    """Experts that a token is sent to; 0 in a dense model."""
    return next((getattr(text, name) for name in EXPERTS_PER_TOKEN if getattr(text, name, None)), 0)


def active_parameters(layer: nn.Module, share: float) -> int:
    """Parameters of a decoder layer that a token passes."""
    return sum(
        round(parameter.numel() * share) if in_experts(name) else parameter.numel()
        for name, parameter in layer.named_parameters()
    )


def intermediate_size(text: PretrainedConfig) -> int:
    """Width of the feed-forward part that a token passes."""
    chosen = experts_per_token(text)
    width = getattr(text, "moe_intermediate_size", None)
    if not chosen or width is None:
        return text.intermediate_size * (chosen or 1)
    return chosen * width

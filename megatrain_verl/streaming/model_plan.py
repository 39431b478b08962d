"""From a Hugging Face config to the ordered units that the engine streams: embedding, decoder layers, head.

The model is built on the meta device, so a plan costs no memory. Layers whose parameter shapes *and* behaviour are
the same form a structure group and share one pair of device templates.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from megatrain_verl import model_sizes
from megatrain_verl.config import LoraSettings
from megatrain_verl.model_sizes import in_experts
from megatrain_verl.streaming import attention, vision_plan
from megatrain_verl.streaming.adapters import Adapters
from megatrain_verl.streaming.attention import MaskKind
from megatrain_verl.streaming.expert_parts import separable_experts, split_layers
from megatrain_verl.streaming.hub_layout import HubLayout
from megatrain_verl.streaming.layer_arguments import DecoderSkeleton, decoder_of, embedding_scale
from megatrain_verl.streaming.model_units import UnitPlan, freeze_parameters, plan_buffers, plan_unit
from megatrain_verl.streaming.quantised_weights import check_quantization
from megatrain_verl.streaming.router_loss import RouterLoss
from megatrain_verl.streaming.vision_plan import VisionPlan

# Families whose loss, gradients and updates are compared with plain transformers in tests/. Others differ in places
# that go wrong silently (soft-caps, embedding scales, masks), so they are refused instead.
VERIFIED_MODEL_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "internvl",
    "llama",
    "llama4_text",
    "llava_next",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "qwen3_vl_moe",
)


@dataclass
class ModelPlan:
    """The units of a model in forward order and what is needed to rebuild its parts on a device."""

    config: PretrainedConfig
    # One meta-device decoder layer per structure group.
    structures: list[nn.Module]
    embedding: UnitPlan
    layers: list[UnitPlan]
    # Final norm and output matrix. For tied models the same object as `embedding`: one parameter, one transfer.
    head: UnitPlan
    norm: nn.Module
    # Names and cuts of the parameters in checkpoints; a folder that is loaded replaces it by its own.
    hub: HubLayout
    # The whole decoder on the meta device, whose forward says what its layers get.
    decoder: nn.Module
    vision: VisionPlan | None = None
    # Rows of the embedding are multiplied by it before the first layer.
    embedding_scale: float = 1.0
    # Logits z become logit_softcap * tanh(z / logit_softcap).
    logit_softcap: float | None = None
    # The auxiliary loss of a mixture of experts, if the config asks for it.
    router_loss: RouterLoss | None = None
    # The token whose embedding gets no gradient (Hugging Face models name pad_token_id); None: every token's does.
    padding_idx: int | None = None
    # Names by which checkpoints may also call a parameter (the tied output matrix), not to be loaded or exported.
    aliases: dict[str, str] = field(default_factory=dict)
    # peft's adapters; then nothing else is trained.
    lora: Adapters | None = None

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    @property
    def units(self) -> list[UnitPlan]:
        vision = [] if self.vision is None else self.vision.units
        return [*vision, self.embedding, *self.layers] + ([] if self.tied else [self.head])

    @property
    def early_units(self) -> list[int]:
        """Numbers of the units whose gradients come first: an untied head, then the decoder layers from the last on."""
        first = len(self.units) - len(self.layers) - (not self.tied)
        return list(reversed(range(first, len(self.units))))

    @property
    def masks(self) -> list[MaskKind]:
        """Which tokens each layer attends to."""
        return [unit.mask for unit in self.layers]

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        """Elements of every unit's arenas, in forward order, with padding."""
        return tuple(unit.numel for unit in self.units)

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """Elements of every decoder layer's arenas, with padding."""
        return tuple(unit.numel for unit in self.layers)

    @property
    def edge_sizes(self) -> tuple[int, ...]:
        """Elements of the arenas of embedding, head and vision part, with padding."""
        return tuple(unit.numel for unit in self.units if unit.structure is None)

    @property
    def slot_sizes(self) -> dict[str, int]:
        """Elements of each device slot that units other than decoder layers take turns in."""
        return self._largest_by_slot("numel")

    @property
    def trained_slot_sizes(self) -> dict[str, int]:
        """The same of what is trained."""
        return self._largest_by_slot("trained")

    def _largest_by_slot(self, elements: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for unit in self.units:
            if unit.structure is None:
                sizes[unit.slot] = max(getattr(unit, elements), sizes.get(unit.slot, 0))
        return sizes

    @property
    def trained_sizes(self) -> tuple[int, ...]:
        """Of `unit_sizes`, the elements that are trained."""
        return tuple(unit.trained for unit in self.units)

    @property
    def trained_layer_sizes(self) -> tuple[int, ...]:
        """Of `layer_sizes`, the elements that are trained."""
        return tuple(unit.trained for unit in self.layers)

    @property
    def trained_edge_sizes(self) -> tuple[int, ...]:
        """Of `edge_sizes`, the elements that are trained."""
        return tuple(unit.trained for unit in self.units if unit.structure is None)

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """Of `layer_sizes`, the elements of routed experts."""
        return tuple(sum(span.numel for span in unit.spans if in_experts(span.local)) for unit in self.layers)

    @property
    def trained_expert_sizes(self) -> tuple[int, ...]:
        """Of `expert_sizes`, the elements that are trained."""
        spans = [[span for span in unit.spans if span.trainable and in_experts(span.local)] for unit in self.layers]
        return tuple(sum(span.numel for span in layer) for layer in spans)

    @property
    def separable_experts(self) -> int:
        """Experts of a mixture layer that can be streamed in parts; 0 if there are none."""
        return separable_experts(self.structures)

    @property
    def hidden_size(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def intermediate_size(self) -> int:
        """Of what a token passes: of a mixture of experts the chosen ones together."""
        return model_sizes.intermediate_size(self.config.get_text_config())

    @property
    def experts_per_token(self) -> int:
        """Experts that a token is sent to; 0 in a dense model."""
        return model_sizes.experts_per_token(self.config.get_text_config())

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of the decoder layers that a token passes."""
        share = model_sizes.expert_share(self.config.get_text_config())
        active = [model_sizes.active_parameters(layer, share) for layer in self.structures]
        return sum(active[unit.structure] for unit in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes: all but the experts that it is not sent to."""
        layers = sum(span.numel for unit in self.layers for span in unit.spans)
        return self.num_parameters - layers + self.active_layer_parameters

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, a tied matrix counted once, padding not counted."""
        return sum(span.numel for unit in self.units for span in unit.spans)

    @property
    def trained_parameters(self) -> int:
        """Of `num_parameters`, those that are trained."""
        return sum(span.numel for unit in self.units for span in unit.spans if span.trainable)

    def has_dropout(self) -> bool:
        """Whether a decoder layer or the vision part draws random numbers in training mode."""
        parts = [*self.structures, *([] if self.vision is None else [self.vision.module])]
        modules = [module for part in parts for module in part.modules()]
        return any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules) or any(
            getattr(module, "attention_dropout", 0.0) for module in modules
        )


def plan_model(
    config: PretrainedConfig, freeze: Sequence[str] = (), lora: LoraSettings | None = None, expert_parts: int = 1
) -> ModelPlan:
    """The plan of a decoder-only model of `config`; parameters that fit one of the patterns `freeze` are not trained,
    and with `lora` none but its adapters. Experts are streamed in `expert_parts`.

    Raises:
        ValueError: an encoder-decoder, quantised or not yet verified model, a pattern that fits nothing, or adapters or
            parts of experts that are not supported; the message names it.
    """
    check_supported(config)
    if freeze and lora is not None:
        raise ValueError(f"LoRA freezes all but its adapters; leave out freeze={list(freeze)}")
    attention.register()
    config = copy.deepcopy(config)  # it will name our attention; the caller's config is what gets exported
    with torch.device("meta"):
        # In float32, whatever type the config names: buffers (router biases) keep theirs when the rest is bfloat16.
        settings = {"attn_implementation": attention.of_parts(config), "dtype": torch.float32}
        model = model_class(config).from_config(config, **settings)
    model.to("meta")  # norms of flash-linear-attention are made on the GPU, whatever the context says
    freeze_parameters(model, freeze)
    decoder = decoder_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    loaded = list(names.values())
    adapters = None if lora is None else Adapters.add(model, lora)
    # peft changes the names of what it wraps; checkpoints do not.
    names = {id(parameter): name for name, parameter in model.named_parameters()} | names
    vision = vision_plan.plan_vision(model.model, names) if vision_plan.has_vision(config) else None
    names |= {id(buffer): name for name, buffer in model.named_buffers()}
    _refuse_unplanned(model, decoder, vision, names)

    tied = model.get_output_embeddings().weight is decoder.embed_tokens.weight
    aliases = {"lm_head.weight": names[id(decoder.embed_tokens.weight)]} if tied else {}
    ends = {"embedding": [("embed_tokens", decoder.embed_tokens)], "head": [("norm", decoder.norm)]}
    if tied:
        ends["embedding"] += ends.pop("head")
    else:
        ends["head"].append(("lm_head", model.get_output_embeddings()))
    planned = {unit: _plan_unit(unit, modules, names) for unit, modules in ends.items()}

    structures: dict[tuple, int] = {}
    layers, templates = [], []
    masks = DecoderSkeleton(decoder, "cpu").mask_kinds()
    for index, (layer, mask) in enumerate(zip(decoder.layers, masks, strict=True)):
        key = (mask, structure_key(layer))
        if key not in structures:
            structures[key] = len(templates)
            templates.append(layer)
        unit = _plan_unit(f"layers.{index}", [("", layer)], names)
        unit.structure, unit.mask, unit.buffers = structures[key], mask, plan_buffers(layer, names)
        layers.append(unit)
    loaded += [buffer.name for unit in layers for buffer in unit.buffers]
    if expert_parts > 1:
        split_layers(layers, templates, decoder, expert_parts)
    return ModelPlan(
        config=config,
        structures=templates,
        embedding=planned["embedding"],
        layers=layers,
        head=planned.get("head", planned["embedding"]),
        norm=decoder.norm,
        decoder=decoder,
        vision=vision,
        embedding_scale=embedding_scale(model),
        logit_softcap=getattr(config.get_text_config(), "final_logit_softcapping", None),
        router_loss=RouterLoss.of(model, decoder),
        hub=HubLayout(model, loaded, aliases),
        padding_idx=decoder.embed_tokens.padding_idx,
        aliases=aliases,
        lora=adapters,
    )


def model_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The Auto class of transformers that builds the whole model of `config`."""
    return AutoModelForImageTextToText if vision_plan.has_vision(config) else AutoModelForCausalLM


def check_supported(config: PretrainedConfig) -> None:
    """Refuse, by name, what the engine would train wrongly."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder model; the streaming engine trains decoder-only models")
    check_quantization(getattr(config, "quantization_config", None))
    if kind not in VERIFIED_MODEL_TYPES:
        raise ValueError(f"model_type {kind!r} is not supported; supported: {', '.join(VERIFIED_MODEL_TYPES)}")


def structure_key(layer: nn.Module) -> tuple:
    """Equal for layers that one template can run: same modules, parameter and buffer shapes, and same settings.

    Every plain attribute of every submodule counts (window, layer type, scales, router kind), except the layer's
    number, which only names its key-value cache.
    """
    key = []
    for name, module in layer.named_modules():
        settings = tuple(
            (attribute, value)
            for attribute, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str | tuple | type(None))
            and not attribute.startswith("_")
            and attribute not in ("layer_idx", "training")
        )
        parameters = tuple(
            (local, parameter.shape, parameter.requires_grad)
            for local, parameter in module.named_parameters(recurse=False)
        )
        buffers = tuple((local, buffer.shape) for local, buffer in module.named_buffers(recurse=False))
        key.append((name, type(module), settings, parameters, buffers))
    return tuple(key)


def _plan_unit(unit: str, modules: list[tuple[str, nn.Module]], names: dict[int, str]) -> UnitPlan:
    parameters = []
    for prefix, module in modules:
        for local, parameter in module.named_parameters():
            parameters.append((f"{prefix}.{local}" if prefix else local, parameter))
    return plan_unit(unit, parameters, names)


def _refuse_unplanned(model: nn.Module, decoder: nn.Module, vision: VisionPlan | None, names: dict[int, str]) -> None:
    """A model with parameters outside the planned parts would train without them: refuse it by their names."""
    planned = [decoder.embed_tokens, decoder.layers, decoder.norm, model.get_output_embeddings()]
    known = {id(parameter) for part in planned for parameter in part.parameters()}
    seen = {span.name for unit in ([] if vision is None else vision.units) for span in unit.spans}
    unknown = [names[id(parameter)] for parameter in model.parameters() if id(parameter) not in known]
    unknown = [name for name in unknown if name not in seen]
    if unknown:
        raise ValueError(f"{type(model).__name__} has parameters the engine does not stream: {', '.join(unknown[:5])}")
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise ValueError(f"the head of {type(model).__name__} has a bias, which is not supported")

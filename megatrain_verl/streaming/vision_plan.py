"""The vision part of a model: the units that its parameters make, and the module that computes with them.

Transformers models of all families here have a base model with a language model and, beside it, an encoder
(`vision_tower`, or `visual`) and a projector into the language model's hidden size. `get_image_features` of the base
model runs both. The encoder is one unit in the device slot of the embedding, which is about as large; the projector is
another, with a slot of its own. Parameters that no loss depends on (the last encoder layers, where features are taken
before them) are frozen.
"""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from megatrain_verl.streaming.model_units import UnitPlan, plan_unit

# What belongs to the projector, by the beginning of its path in the base model. The rest is the encoder's.
PROJECTORS = ("multi_modal_projector", "image_newline", "visual.merger", "visual.deepstack_merger_list")
LANGUAGE_MODEL = "language_model"
TRIAL_PATCHES = 16  # more crops than LLaVA-NeXT makes of an image of the encoder's own size


@dataclass
class VisionPlan:
    """Units of the vision part, and the base model on the meta device without its language model.

    `image_token_id` stands where an image feature goes; `arguments` are those that `get_image_features` takes,
    `bidirectional`: the tokens of an image attend to all of each other.
    """

    module: PreTrainedModel
    encoder: UnitPlan
    projector: UnitPlan
    image_token_id: int
    arguments: tuple[str, ...]
    bidirectional: bool

    @property
    def units(self) -> list[UnitPlan]:
        """Encoder and projector."""
        return [self.encoder, self.projector]

    @staticmethod
    def encoder_of(module: PreTrainedModel) -> nn.Module:
        """The encoder in a base model with a vision part."""
        return module.vision_tower if hasattr(module, "vision_tower") else module.visual


def has_vision(config: PretrainedConfig) -> bool:
    """Whether a model of `config` takes images."""
    return getattr(config, "vision_config", None) is not None


def plan_vision(base: PreTrainedModel, names: dict[int, str]) -> VisionPlan:
    """The plan of the vision part of `base`, whose parameters are called `names` (by id).

    Raises:
        ValueError: a part without parameters: another structure than the families here have.
    """
    _freeze_unused(base)
    parts: dict[str, list[tuple[str, nn.Parameter]]] = {"encoder": [], "projector": []}
    for path, parameter in _vision_parameters(base):
        parts["projector" if path.startswith(PROJECTORS) else "encoder"].append((path, parameter))
    for kind, parameters in parts.items():
        if not parameters:
            raise ValueError(f"{type(base).__name__} has no vision {kind} that the engine knows")
    encoder, projector = (plan_unit(f"vision_{kind}", parameters, names) for kind, parameters in parts.items())
    projector.slot = "projector"
    return VisionPlan(
        module=_without_language_model(base),
        encoder=encoder,
        projector=projector,
        image_token_id=base.config.image_token_id,
        arguments=tuple(inspect.signature(base.get_image_features).parameters),
        bidirectional="token_type_ids" in inspect.signature(base.forward).parameters,
    )


def materialise_buffers(module: PreTrainedModel, device: str) -> None:
    """Give the buffers of `module`, on the meta device, their values: what the models' own initialisation sets.

    They follow from the config and are in no checkpoint (positions, rotary frequencies). Parameters stay as they are.
    """
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]  # outer ones first
    owner = {id(part): model for model in models for part in model.modules()}
    for part in module.modules():
        buffers = dict(part.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            part._buffers[name] = torch.empty_like(buffer, device=device)
        if buffers:
            for parameter in part.parameters(recurse=False):
                parameter._is_hf_initialized = True
            with torch.no_grad():
                owner[id(part)]._init_weights(part)


def image_features(module: PreTrainedModel, images: dict[str, Tensor]) -> list[Tensor]:
    """What `module` makes of `images`, each (N, H) in the order of the image tokens.

    The first goes to the places of the image tokens, the others (of a model with deepstack) are added there to the
    outputs of the first decoder layers, in order.
    """
    outputs = module.get_image_features(**images, return_dict=True)
    features = outputs.pooler_output
    parts = [features] if isinstance(features, Tensor) else features
    whole = torch.cat([part.flatten(0, -2) for part in parts])
    return [whole, *(getattr(outputs, "deepstack_features", None) or [])]


def _vision_parameters(base: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return (
        (path, parameter) for path, parameter in base.named_parameters() if not path.startswith(f"{LANGUAGE_MODEL}.")
    )


def _without_language_model(base: PreTrainedModel) -> PreTrainedModel:
    language_model = base._modules.pop(LANGUAGE_MODEL)
    try:
        return copy.deepcopy(base)
    finally:
        base._modules[LANGUAGE_MODEL] = language_model


def _freeze_unused(base: PreTrainedModel) -> None:
    """Freeze the vision parameters that image features do not depend on, found by a trial on the meta device.

    Encoders of images of any size (`visual`) use all of theirs; where they lie in an image cannot be computed there.
    """
    if not hasattr(base, "vision_tower"):
        return
    size = base.config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    images = {"pixel_values": torch.empty(1, 3, height, width, device="meta")}
    if "image_sizes" in inspect.signature(base.get_image_features).parameters:
        images["pixel_values"] = images["pixel_values"].expand(1, TRIAL_PATCHES, -1, -1, -1)
        images["image_sizes"] = torch.tensor([[height, width]])
    parameters = [parameter for _, parameter in _vision_parameters(base) if parameter.requires_grad]
    if not parameters:
        return
    with torch.enable_grad():
        total = image_features(base, images)[0].sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


def bind_vision(plan: VisionPlan, buffers: dict[str, Tensor], device: str) -> PreTrainedModel:
    """A copy of the vision module whose parameters are views into `buffers` (by unit), ready to run on `device`.

    Its blocks keep only their inputs in a pass with a graph.
    """
    module = copy.deepcopy(plan.module)
    for unit in plan.units:
        for span in unit.spans:
            path, _, name = span.local.rpartition(".")
            value = buffers[unit.name][span.offset : span.offset + span.numel].view(span.shape)
            setattr(module.get_submodule(path), name, nn.Parameter(value, requires_grad=span.trainable))
    materialise_buffers(module, device)
    plan.encoder_of(module).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return module

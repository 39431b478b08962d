"""LoRA by peft: low-rank adapters beside linear layers, which stay frozen.

    y = W x + alpha / rank * B A x        A (rank, in) and B (out, rank) are trained, W (out, in) is not

peft puts its layers into the transformers model on the meta device. So A and B are parameters of their units, streamed,
trained and saved as any other, and nothing but the weights is kept for the frozen rest. Without the adapters the same
model is the reference policy.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain_verl.config import LoraSettings

if TYPE_CHECKING:
    import peft

    from megatrain_verl.streaming.host_store import UnitState

NAME = "default"  # peft's own name for the adapter of a model that has one
DOWN, UP = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
PREFIX = "base_model.model."  # of the names in peft's files
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model. `config` is peft's, with the names of the layers that have one."""

    config: "peft.LoraConfig"

    @classmethod
    def add(cls, model: PreTrainedModel, settings: LoraSettings) -> "Adapters":
        """Put adapters into `model`, on the meta device, and freeze all else.

        Raises:
            ValueError: nothing fits `settings.target_modules`, or something that is no linear layer of a decoder layer
                or of the vision part; names it.
        """
        import peft  # takes seconds

        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=copy.copy(settings.target_modules),
            exclude_modules=copy.copy(settings.exclude_modules),
        )
        output = model.get_output_embeddings()
        with torch.device("meta"):
            peft.inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=True)
        for name, module in model.named_modules():
            if not isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                continue
            if type(module) is not peft.tuners.lora.Linear or type(module.base_layer) is not nn.Linear:
                raise ValueError(
                    f"target_modules={settings.target_modules} puts an adapter on {name or 'the model'}, which is no "
                    "linear layer (peft counts experts and routers of a mixture among them); name linear layers, such "
                    "as target_modules=[q_proj,k_proj,v_proj,o_proj]"
                )
            if module.base_layer is output:
                raise ValueError(f"an adapter on the output matrix {name} is not supported: leave it out")
        return cls(config)

    @property
    def scaling(self) -> float:
        """The factor of what an adapter adds."""
        return self.config.lora_alpha / self.config.r

    def write(self, folder: Path, weights: dict[str, Tensor], base: str) -> None:
        """Write an adapter that `peft.PeftModel.from_pretrained` loads onto the model `base` (folder or hub name)."""
        config = copy.copy(self.config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(folder)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS, {"format": "pt"})


def start(units: "list[UnitState]", seed: int) -> None:
    """Give the adapters of `units` the values that peft starts with: A as `nn.Linear` does, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for unit in units:
        for span in unit.plan.spans:
            if span.name.endswith(DOWN):
                values = torch.empty(span.shape)
                unit.write(span, nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator))
            elif span.name.endswith(UP):
                unit.write(span, torch.zeros(span.shape))


def enable_adapters(module: nn.Module, enabled: bool) -> None:
    """Let the adapters in `module` take part in its forward pass, or not."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.enable_adapters(enabled)


def merged_weights(unit: "UnitState", lora: Adapters | None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the model's own parameters and buffers in `unit`, with what the adapters add to them.

    Without an adapter it is a view of the arena. The sum is taken in float32 and rounded to the type of the weights;
    no matrix is kept here.
    """
    spans = {span.name: span for span in unit.plan.spans}
    for name, span in spans.items():
        weight = unit.view(unit.weight, span)
        layer = name.removesuffix(".weight")
        if layer + DOWN in spans:
            down, up = (unit.view(unit.weight, spans[layer + part]).float() for part in (DOWN, UP))
            weight = (weight.float() + up @ down * lora.scaling).to(weight.dtype)
        if not name.endswith((DOWN, UP)):
            yield name, weight
    yield from unit.buffers.items()


def adapter_weights(unit: "UnitState") -> Iterator[tuple[str, Tensor]]:
    """(name in peft's files, view of the arena) of the adapters in `unit`."""
    for span in unit.plan.spans:
        if span.name.endswith((DOWN, UP)):
            yield PREFIX + span.name.replace(f".{NAME}.", "."), unit.view(unit.weight, span)

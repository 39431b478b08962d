"""The auxiliary loss that balances the experts of a mixture, where the config asks for it (output_router_logits).

    loss = coefficient * E * sum over experts e of f_e P_e

f_e: choices of expert e per token (no gradient), P_e: mean probability of e; Switch Transformer, equations 4 to 6, as
`load_balancing_loss_func` of transformers. Both are means over all layers with experts and over all tokens of a
`forward_backward` call, as if the call were one batch of plain transformers: the loss does not depend on how the tokens
are cut into micro-batches. Where a call runs in several waves, each has its own loss, weighted by its tokens.

f is known when the forward pass ends. In the backward pass a layer adds coefficient * E * (sum of f_e times its part of
P_e), which has the gradient of the whole for its router.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain_verl.model_sizes import EXPERT_COUNTS


@dataclass(frozen=True)
class RouterLoss:
    """What a model asks for. Element `index` of what a module of type `router` returns are the logits (T, E)."""

    coefficient: float
    num_experts: int
    top_k: int
    router: type[nn.Module]
    index: int

    @classmethod
    def of(cls, model: PreTrainedModel, decoder: nn.Module) -> "RouterLoss | None":
        """The auxiliary loss of `model`, or None. Models that take images have their settings in the text config."""
        text = model.config.get_text_config()
        asked = any(getattr(config, "output_router_logits", False) for config in (model.config, text))
        has_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
        if not has_loss or not asked:
            return None
        recorder = decoder._can_record_outputs["router_logits"]
        experts = next(getattr(text, name) for name in EXPERT_COUNTS if getattr(text, name, None))
        sizes = (text.router_aux_loss_coef, experts, text.num_experts_per_tok)
        return cls(*sizes, recorder.target_class, recorder.index)

    def record(self, layer: nn.Module) -> None:
        """Let the routers of `layer` keep the logits of their last call; `layer` is changed."""
        for module in layer.modules():
            if isinstance(module, self.router):
                module.register_forward_hook(self._keep_logits)

    def _keep_logits(self, module: nn.Module, inputs: tuple, output: tuple) -> None:
        module.kept_logits = output[self.index]


class RouterBalance:
    """The sums of one pass over its layers and micro-batches; `share` weights its loss."""

    def __init__(self, settings: RouterLoss, share: float, device: str) -> None:
        self._settings, self._scale = settings, share * settings.coefficient * settings.num_experts
        self._choices, self._probabilities = torch.zeros(2, settings.num_experts, device=device)
        self._tokens = 0

    def logits(self, layer: nn.Module) -> Tensor | None:
        """What the router of `layer` kept of its last call, (T, E); None for a layer without one."""
        routers = (module for module in layer.modules() if isinstance(module, self._settings.router))
        return next((module.kept_logits for module in routers), None)

    @torch.no_grad()
    def add(self, logits: Tensor | None) -> None:
        """Count what a router did in the forward pass."""
        if logits is not None:
            chosen = logits.topk(self._settings.top_k, dim=-1).indices.flatten()
            self._choices.index_add_(0, chosen, self._choices.new_ones(()).expand(len(chosen)))
            self._probabilities += logits.softmax(-1, dtype=torch.float32).sum(0)
            self._tokens += logits.shape[0]

    def loss(self) -> Tensor:
        """() float32, after the forward pass."""
        return self._scale * (self._choices @ self._probabilities) / self._tokens**2

    def part(self, logits: Tensor) -> Tensor:
        """() float32 part of the loss that follows from `logits` (T, E) of one call, with gradient."""
        return self._scale * (logits.softmax(-1, dtype=torch.float32).sum(0) @ self._choices) / self._tokens**2

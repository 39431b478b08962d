"""Makes the engine known to verl, and says what a process must not go on with."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from megatrain_verl.config import LoraSettings
from verl_patches.import_hook import after_import

# Set when verl's plug-in loader swallowed an exception of `plugin.py`.
plugin_failure: BaseException | None = None


def register_engine() -> None:
    """Register the engine as soon as verl's engines are imported: at once in a worker, never in most processes.

    Raises:
        RuntimeError: the plug-in failed to load in this process.
    """
    if plugin_failure is not None:
        raise RuntimeError(f"the verl plug-in of megatrain_verl failed in this process: {plugin_failure}") from (
            plugin_failure
        )
    after_import("verl.workers.engine", _import_engine)


def _import_engine(_: object) -> None:
    import megatrain_verl.verl_backend.engine  # noqa: F401


def refuse_several_hosts(nodes: int) -> None:
    """All ranks share the arenas in one host's memory.

    Raises:
        ValueError: more than one host.
    """
    if nodes > 1:
        raise ValueError(f"megatrain runs on the GPUs of one host (got trainer.nnodes={nodes}); set trainer.nnodes=1")


def lora_settings(model: Mapping[str, Any]) -> LoraSettings | None:
    """The LoRA adapters that verl's `model` options ask for, by the names that verl's FSDP engine reads.

    Raises:
        ValueError: adapters that would be ignored without a word, or multi-token-prediction training.
    """
    lora = model.get("lora") or {}
    if lora.get("rank", 0) > 0:
        raise ValueError(
            "model.lora.rank is of verl's Megatron engine; set model.lora_rank, lora_alpha, target_modules"
        )
    for option in ("lora_adapter_path", "target_parameters"):
        if model.get(option) is not None:
            raise ValueError(f"model.{option} is not supported by megatrain; set it to null")
    mtp = model.get("mtp") or {}
    if mtp.get("enable", False):
        raise ValueError("multi-token prediction is not supported by megatrain; set model.mtp.enable=False")
    if model.get("lora_rank", 0) <= 0:
        return None
    if lora.get("type", "lora") != "lora":
        raise ValueError(f"model.lora.type={lora['type']} is not supported by megatrain; set it to lora")
    names = (_plain(model.get(option)) for option in ("target_modules", "exclude_modules"))
    return LoraSettings(model["lora_rank"], model["lora_alpha"], *names)


def check_merged(model: Mapping[str, Any]) -> None:
    """The engine sends merged weights to the rollout, which must not be set up for adapters beside them.

    Raises:
        ValueError: LoRA without `lora.merge`.
    """
    if lora_settings(model) is not None and not (model.get("lora") or {}).get("merge", False):
        raise ValueError(
            "megatrain merges LoRA adapters into the weights that it sends to the rollout; set "
            "actor_rollout_ref.model.lora.merge=True"
        )


def check_lora_only(model: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """verl's `checkpoint.save_lora_only` puts an adapter in the place of the weights that `hf_model` asks for.

    Raises:
        ValueError: it would do nothing.
    """
    if not checkpoint.get("save_lora_only", False):
        return
    if lora_settings(model) is None or "hf_model" not in checkpoint["save_contents"]:
        raise ValueError(
            "checkpoint.save_lora_only=True needs model.lora_rank above 0 and hf_model in checkpoint.save_contents; "
            "set these, or leave it out"
        )


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

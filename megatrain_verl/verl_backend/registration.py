"""Makes the engine known to verl, and says what a process must not go on with."""

from collections.abc import Mapping
from typing import Any

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


def refuse_adapters(model: Mapping[str, Any]) -> None:
    """The engine trains all parameters; an adapter in the configuration would be ignored without a word.

    Raises:
        ValueError: LoRA or multi-token-prediction training is asked for.
    """
    lora = model.get("lora") or {}
    if model.get("lora_rank", 0) > 0 or lora.get("rank", 0) > 0 or model.get("lora_adapter_path") is not None:
        raise ValueError("LoRA is not supported by megatrain, which trains all parameters; set model.lora_rank=0")
    mtp = model.get("mtp") or {}
    if mtp.get("enable", False):
        raise ValueError("multi-token prediction is not supported by megatrain; set model.mtp.enable=False")

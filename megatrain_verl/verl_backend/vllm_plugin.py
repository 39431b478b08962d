"""Entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""


def register() -> None:
    """On a CPU platform, keep vLLM's weights replaceable and its images right; on a GPU there is nothing to do."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from verl_patches import vllm_cpu_weights, vllm_image_norm

        vllm_cpu_weights.apply()
        vllm_image_norm.apply()

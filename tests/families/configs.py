"""Tiny versions of the published configs of every family that the engine trains.

Widths and numbers of experts are small; what decides how a model computes is as published: layer patterns, windows
(shorter than the test rows), ratios of heads, kinds of rotary embedding and of router, scales and soft-caps.
"""

from transformers import AutoConfig, PretrainedConfig

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "factor": 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
LINEAR_ATTENTION = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# Name of a published model -> model_type and settings.
DENSE = {
    "SmolLM2-135M": ("llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1,
                               "tie_word_embeddings": True,
                               "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "Llama-2-7B": ("llama", {"num_key_value_heads": 4}),
    "Llama-3.1-8B": ("llama", {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}),
    "DeepSeek-LLM-67B": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "Yi-1.5-6B": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "pad_token_id": 0}),
    "Mistral-7B-v0.1": ("mistral", {"sliding_window": 6}),
    "Mistral-7B-v0.3": ("mistral", {"sliding_window": None}),
    "Qwen2.5-0.5B": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2.5-7B": ("qwen2", {"use_sliding_window": False}),
    "Qwen2 with window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "Qwen3-0.6B": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "Qwen3-8B": ("qwen3", {"head_dim": 8}),
    "Phi-3-mini-4k": ("phi3", {"num_key_value_heads": 4, "sliding_window": 6, "pad_token_id": 0}),
    "Phi-4": ("phi3", {"sliding_window": None, "pad_token_id": 90,
                       "rope_parameters": {"rope_type": "default", "rope_theta": 25e4}}),
    "Phi-4-mini": ("phi3", {"tie_word_embeddings": True, "pad_token_id": 90, "sliding_window": 250,
                            "original_max_position_embeddings": 16,
                            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4,
                                                "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16,
                                                "short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0]}}),
    "Gemma-2-9B": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 10, "sliding_window": 6, "pad_token_id": 0,
                              "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
                              "layer_types": ALTERNATING, "tie_word_embeddings": True}),
    "Gemma-3-1B": ("gemma3_text", {"head_dim": 8, "query_pre_attn_scalar": 10, "sliding_window": 6, "pad_token_id": 0,
                                   "layer_types": ALTERNATING, "tie_word_embeddings": True,
                                   "rope_parameters": {
                                       "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                       "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    "GLM-4-9B": ("glm", {"head_dim": 8, "attention_bias": True, "pad_token_id": 90, "partial_rotary_factor": 0.5}),
    "GLM-4-9B-0414": ("glm4", {"head_dim": 8, "attention_bias": True, "pad_token_id": 90,
                               "partial_rotary_factor": 0.5}),
}  # fmt: skip
HYBRID = {
    "Qwen3.5-27B": ("qwen3_5_text", LINEAR_ATTENTION),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {**LINEAR_ATTENTION, **EXPERTS, **SHARED_EXPERT}),
    "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", {**LINEAR_ATTENTION, **EXPERTS, **SHARED_EXPERT}),
}
MIXTURES = {
    "Mixtral-8x7B": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "Qwen3-30B-A3B": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "mlp_only_layers": [1]}),
    "DeepSeek-V2-Lite": ("deepseek_v2", {**MLA, "q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False,
                                         "n_group": 1, "topk_group": 1, "topk_method": "greedy",
                                         "rope_parameters": {**DEEPSEEK_ROPE, "rope_theta": 1e4, "mscale": 0.707,
                                                             "mscale_all_dim": 0.707}}),
    "DeepSeek-V3": ("deepseek_v3", {**MLA, "q_lora_rank": 12, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
                                    "routed_scaling_factor": 2.5,
                                    "rope_parameters": {**DEEPSEEK_ROPE, "rope_theta": 1e4, "mscale": 1.0,
                                                        "mscale_all_dim": 1.0}}),
    "GLM-4.5-Air": ("glm4_moe", {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5,
                                 "pad_token_id": 90, "num_attention_heads": 8, "n_routed_experts": 8,
                                 "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                                 "n_group": 1, "topk_group": 1}),
    "GLM-4.5": ("glm4_moe", {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": True,
                             "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
                             "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {**MLA, "q_lora_rank": 12, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
                                        "routed_scaling_factor": 1.8}),
    "Llama-4-Scout": ("llama4_text", {"head_dim": 8, "num_hidden_layers": 4, "intermediate_size_mlp": 64,
                                      "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
                                      "attention_chunk_size": 7, "no_rope_layer_interval": 4, "floor_scale": 5,
                                      "attn_temperature_tuning": True,
                                      "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}),
    "GPT-OSS-20B": ("gpt_oss", {"head_dim": 8, "attention_bias": True, "sliding_window": 6, "pad_token_id": 90,
                                "num_local_experts": 8, "num_experts_per_tok": 3, "layer_types": ALTERNATING,
                                "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                                                    "beta_slow": 1.0, "truncate": False, "rope_theta": 15e4,
                                                    "original_max_position_embeddings": 8}}),
}  # fmt: skip
FAMILIES = {**DENSE, **HYBRID, **MIXTURES}


def family_config(name: str, **settings: object) -> PretrainedConfig:
    """The tiny config of a published model, with `settings` on top."""
    model_type, own = FAMILIES[name]
    return AutoConfig.for_model(model_type, **{**COMMON, **own, **settings})

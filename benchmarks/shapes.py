"""Model shapes by name, so that a benchmark needs no download: the published config.json values."""

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig, Qwen2Config

QWEN2_5 = {
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SHAPES = {
    "tiny": {  # for trying the benchmarks out without a GPU
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,  # heads of 32 are the least that vLLM's CPU attention takes
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "qwen2.5-14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}


def model_config(name: str, layers: int | None = None) -> PretrainedConfig:
    """The config of a known shape or of a folder or config.json; with `layers`, cut to that many.

    Raises:
        ValueError: neither a known name nor a path.
    """
    if name in SHAPES:
        config = Qwen2Config(**{**QWEN2_5, **SHAPES[name]})
    elif Path(name).exists():
        config = AutoConfig.from_pretrained(name)
    else:
        raise ValueError(f"unknown model {name!r}: give a folder with config.json or one of {', '.join(SHAPES)}")
    if layers is not None:
        settings = config.to_dict()
        settings.pop("layer_types", None)
        config = type(config)(**{**settings, "num_hidden_layers": layers})
    return config

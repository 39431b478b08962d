"""Tiny models that take images, with the peculiarities of the real configs, and rows with images for them."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

from megatrain_verl.streaming.batch import MicroBatch
from megatrain_verl.streaming.images import join_images
from tests import oracle

IMAGE_TOKEN = 90
TEXT_VOCAB = 80  # ids below it are text
TEXT = {**oracle.SIZES, "num_hidden_layers": 3, "tie_word_embeddings": False}
QWEN_VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWER = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
QWEN3_VISION = {
    **QWEN_VISION,
    "hidden_size": 16,
    "intermediate_size": 20,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
CONFIGS: dict[str, dict] = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {
            **QWEN_VISION,
            "hidden_size": 16,
            "intermediate_size": 20,
            "out_hidden_size": 32,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**QWEN_VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    },
    "qwen3_vl": {  # features of two encoder layers are added behind the first two decoder layers
        "text_config": {**TEXT, "head_dim": 8, "rope_parameters": ROPE},
        "vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5": {  # linear attention in two of three layers
        "text_config": {
            **TEXT,
            "head_dim": 8,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        },
        "vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": []},
    },
    "gemma3": {  # image tokens see each other, within and across the window
        "text_config": {
            **TEXT,
            "tie_word_embeddings": True,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            **TOWER,
            "image_size": 24,
            "patch_size": 4,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 9,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2", "rope_parameters": DYNAMIC_ROPE},
        "vision_config": {
            "model_type": "internvl_vision",
            **TOWER,
            "image_size": [16, 16],
            "patch_size": [4, 4],
            "attention_bias": True,
            "use_absolute_position_embeddings": True,
            "use_mean_pooling": True,
        },
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
    },
    "llava_next": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "image_size": 16, "patch_size": 4},
        "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
for _dense, _more in (("qwen3_vl", {"decoder_sparse_step": 1}), ("qwen3_5", {"shared_expert_intermediate_size": 16})):
    CONFIGS[f"{_dense}_moe"] = {
        **CONFIGS[_dense],
        "text_config": {**CONFIGS[_dense]["text_config"], **MOE, **_more},
    }


@dataclass
class Row:
    """Token ids (L,) with image tokens, and what `get_image_features` takes of the row's images (None without)."""

    ids: Tensor
    images: dict[str, Tensor] | None


def tiny_config(family: str, **text: object) -> PretrainedConfig:
    """A tiny config of a family of `CONFIGS`; `text` replaces settings of its language model."""
    settings = dict(CONFIGS[family])
    settings["text_config"] = {**settings["text_config"], **text}
    tied = settings["text_config"]["tie_word_embeddings"]
    return AutoConfig.for_model(
        family, **settings, image_token_id=IMAGE_TOKEN, video_token_id=91, tie_word_embeddings=tied
    )


def plain_model(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    """A float32 transformers model with weights large enough for attention and images to matter."""
    torch.manual_seed(seed)
    # Linear attention and Gemma's scaled embeddings round more, which larger weights multiply on the way back.
    scale = 3 if config.model_type in ("qwen3_5", "qwen3_5_moe", "gemma3") else 8
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():  # Gemma 3's projector, which would let no gradient through
                parameter.normal_(0, 0.1)
            if parameter.dim() > 1:
                parameter.mul_(scale if "language_model" in name or "lm_head" in name else 4)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rows(family: str, counts: list[int], seed: int = 1) -> list[Row]:
    """Rows with as many images as `counts` says, of different sizes, between random text."""
    generator = torch.Generator().manual_seed(seed)
    return [_row(family, count, generator) for count in counts]


def pack(batch: list[Row]) -> MicroBatch:
    """One micro-batch of `batch`; M-RoPE is left to the engine."""
    packed = oracle.pack([row.ids for row in batch])
    packed.images = join_images([row.images for row in batch])
    return packed


def plain_log_probs(model: nn.Module, row: Row, temperature: float = 1.0) -> Tensor:
    """(L - 1,) log-probs of the next tokens of one row, with gradient, from the model's own forward."""
    logits = plain_logits(model, row)[:-1].float() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, row.ids[1:, None]).squeeze(1)


def plain_logits(model: nn.Module, row: Row) -> Tensor:
    """(L, V) logits of one row, with gradient."""
    types = (row.ids == IMAGE_TOKEN).int()[None]
    extra = {
        "gemma3": {"token_type_ids": types},
        "internvl": {},
        "llava_next": {},
    }.get(model.config.model_type, {"mm_token_type_ids": types})
    return model(input_ids=row.ids[None], **(row.images or {}), **extra).logits[0]


def _row(family: str, count: int, generator: torch.Generator) -> Row:
    images, parts = [], [_text(5, generator)]
    for _ in range(count):
        image, tokens = IMAGES[family](generator)
        images.append(image)
        parts += [torch.full((tokens,), IMAGE_TOKEN), _text(4, generator)]
    return Row(torch.cat(parts), join_images(images))


def _text(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, TEXT_VOCAB, (length,), generator=generator)


def _qwen_image(generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    height, width = (2 * int(torch.randint(1, 5, (), generator=generator)) for _ in range(2))
    pixels = torch.randn(height * width, 3 * 2 * 4 * 4, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}, height * width // 4


def _llava_image(generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    """16 base tokens, then the crops' with what pads the image's shape cut off and a newline for each line."""
    sizes = {(16, 32): (3, 4 * 8 + 4), (30, 32): (5, 8 * 8 + 8), (32, 16): (3, 8 * 4 + 8)}
    size = list(sizes)[int(torch.randint(0, 3, (), generator=generator))]
    crops, tokens = sizes[size]
    pixels = torch.randn(1, crops, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([size])}, 16 + tokens


def _fixed_image(size: int, tokens: int, generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    return {"pixel_values": torch.randn(1, 3, size, size, generator=generator)}, tokens


IMAGES = {
    **dict.fromkeys([family for family in CONFIGS if family.startswith("qwen")], _qwen_image),
    "gemma3": partial(_fixed_image, 24, 9),
    "internvl": partial(_fixed_image, 16, 4),
    "llava_next": _llava_image,
}

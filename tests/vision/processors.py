"""Processors of tiny models, with a byte tokenizer, saved beside the models."""

from pathlib import Path

from transformers import LlavaNextImageProcessor, LlavaNextProcessor

from tests.sft.cases import byte_tokenizer
from tests.vision import cases

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_llava(folder: Path) -> LlavaNextProcessor:
    """A tiny LLaVA-NeXT with its processor in `folder`; its image token is the tokenizer's `<image>`."""
    tokenizer = byte_tokenizer(None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    config = cases.tiny_config("llava_next", vocab_size=len(tokenizer))
    config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    images = LlavaNextImageProcessor(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=config.image_grid_pinpoints,
    )
    processor = LlavaNextProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    cases.plain_model(config).save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor

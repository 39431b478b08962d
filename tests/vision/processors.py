"""Processors of tiny models, with a byte tokenizer whose last tokens are those of images."""

from pathlib import Path

from transformers import (
    BaseVideoProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.utils import is_torchvision_available

from tests.sft.cases import byte_tokenizer
from tests.vision import cases

TOKENS = {
    "llava_next": {"image_token": "<image>"},
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
}
SHOWN = {"llava_next": "<image>", "gemma3": "<start_of_image>"}
QWEN = {  # processors of images and of videos
    "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
    "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
}
for _family in QWEN:
    TOKENS[_family] = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    TOKENS[_family] |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    SHOWN[_family] = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ 'IMAGE' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(family: str) -> ProcessorMixin:
    """The processor of `cases.tiny_config(family)`, without its video part."""
    base = byte_tokenizer(None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens=TOKENS[family],
    )
    shared = {"tokenizer": tokenizer, "chat_template": CHAT.replace("IMAGE", SHOWN[family])}
    if family == "llava_next":
        sides = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        pinpoints = cases.CONFIGS[family]["image_grid_pinpoints"]
        settings = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        images = LlavaNextImageProcessor(image_grid_pinpoints=pinpoints, **sides)
        return LlavaNextProcessor(image_processor=images, **settings, **shared)
    if family == "gemma3":
        images = Gemma3ImageProcessor(size={"height": 24, "width": 24})
        return Gemma3Processor(image_processor=images, image_seq_length=9, **shared)
    kind, video = QWEN[family]
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    patches["size"] = {"shortest_edge": 256, "longest_edge": 1024}
    if is_torchvision_available():  # vLLM asks it for the sizes of videos
        videos = video(**patches)
    else:
        videos = BaseVideoProcessor.__new__(BaseVideoProcessor)  # the rows have no video
    return kind(image_processor=Qwen2VLImageProcessor(**patches), video_processor=videos, **shared)


def save(family: str, folder: Path) -> None:
    """A tiny model and its processor in `folder`."""
    processor = make(family)
    config = cases.tiny_config(family, vocab_size=len(processor.tokenizer))
    config.image_token_id = processor.image_token_id
    cases.plain_model(config).save_pretrained(folder)
    processor.save_pretrained(folder)

"""Processors of models that take images, also of those that verl 0.9.1 has none for: LLaVA-NeXT, Gemma 3, InternVL."""

import logging

from transformers import AutoProcessor, PretrainedConfig, ProcessorMixin
from verl.workers.config import HFModelConfig

from megatrain_verl.streaming.vision_plan import has_vision

logger = logging.getLogger(__name__)


def image_processor(model: HFModelConfig) -> ProcessorMixin | None:
    """The processor of `model`; None for a text model, or where it cannot be loaded, which is logged."""
    if model.processor is not None or not has_vision(model.hf_config):
        return model.processor
    return load_processor(model.local_tokenizer_path, model.hf_config, model.custom_chat_template)


def load_processor(path: str, config: PretrainedConfig, chat_template: str | None = None) -> ProcessorMixin | None:
    """The processor in the folder `path` of a model of `config`, with `chat_template` if one is given.

    None for a text model, and where there is no image processor, it is damaged, or a package that it needs is missing.
    """
    if not has_vision(config):
        return None
    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        logger.warning("the processor of images in %s cannot be used: %s", path, error)
        return None
    if not isinstance(processor, ProcessorMixin):  # a folder without one: the tokenizer
        return None
    processor.chat_template = chat_template or processor.chat_template
    return processor

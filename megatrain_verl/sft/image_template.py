"""Conversations with images, rendered and tokenized by the processor of the model.

The processor writes as many tokens for an image as the model makes features of it, which depends on the image's size.
Every text that `ChatTemplate` compares goes through the processor with the images it shows.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from megatrain_verl.sft.chat_template import ChatTemplate, Encoded
from megatrain_verl.sft.conversations import Conversation, Message, UnusableRow
from megatrain_verl.sft.images import MARK, ImageSource, open_images
from megatrain_verl.streaming.images import IMAGE_INPUTS


@dataclass(frozen=True)
class EncodedImages(Encoded):
    """A conversation with images: its rendered `text`, from which pixels are made when the row is used, and the number
    of tokens up to its last image.
    """

    text: str = ""
    images: list[ImageSource] = field(default_factory=list)
    images_end: int = 0

    def cut(self, length: int) -> "EncodedImages":
        if length < self.images_end:
            raise UnusableRow(f"its images reach beyond data.max_length={length} tokens")
        short = super().cut(length)
        return EncodedImages(short.input_ids, short.loss_mask, self.text, self.images, self.images_end)

    def columns(self) -> dict[str, Any]:
        return {**super().columns(), "text": self.text, "images": self.images}


class ImageTemplate(ChatTemplate):
    """The chat template of a processor. Image tokens are never trained.

    Raises:
        ValueError: neither the processor nor its tokenizer has a chat template.
    """

    def __init__(self, processor: ProcessorMixin, *, train_on_prompt: bool = False, **kwargs: Any) -> None:
        self._processor = processor
        tokenizer = copy.copy(processor.tokenizer)
        tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
        # What the template writes for an image; Gemma's writes the token that begins one.
        self._image_text = getattr(processor, "boi_token", None) or processor.image_token
        super().__init__(tokenizer, train_on_prompt=train_on_prompt, **kwargs)

    def encode(self, conversation: Conversation) -> EncodedImages:
        marks = sum(message["content"].count(MARK) for message in conversation.messages)
        if marks != len(conversation.images):
            raise UnusableRow(f"its messages have {marks} {MARK} for {len(conversation.images)} images")
        encoded = super().encode(conversation)
        token = self._processor.image_token_id
        mask = [
            0 if each == token else trained for each, trained in zip(encoded.input_ids, encoded.loss_mask, strict=True)
        ]
        end = max((place for place, each in enumerate(encoded.input_ids, 1) if each == token), default=0)
        if bool(end) != bool(conversation.images):
            raise UnusableRow(f"its text has {self._image_text} without an image, or the template shows no images")
        text = self.render(conversation.messages, conversation.tools) if conversation.images else ""
        return EncodedImages(encoded.input_ids, mask, text, conversation.images, end)

    def _shown(self, messages: list[Message]) -> list[Message]:
        return [{**message, "content": _parts(message["content"])} for message in messages]

    def _tokenize(self, texts: list[str], conversation: Conversation) -> list[list[int]]:
        images = open_images(conversation.images)
        return [self._tokens(text, images[: text.count(self._image_text)]) for text in texts]

    def _tokens(self, text: str, images: list[Any]) -> list[int]:
        if not images:
            return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self._processor(text=[text], images=images, add_special_tokens=False)["input_ids"][0]


def pixel_inputs(processor: ProcessorMixin, text: str, images: list[ImageSource]) -> dict[str, Any]:
    """What the model takes of the images of a row whose rendered text is `text`."""
    inputs = processor(text=[text], images=open_images(images), add_special_tokens=False, return_tensors="pt")
    return {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}


def processor_of(
    name: str, has_images: bool, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
) -> ProcessorMixin | None:
    """`processor`, which a data set with images cannot do without.

    Raises:
        ValueError: data set `name` has images and there is no processor.
    """
    if has_images and processor is None:
        raise ValueError(
            f"data set {name} has images, but there is no image processor for {tokenizer.name_or_path}: the model "
            "takes text only, or a package that its processor needs is missing (Qwen's and InternVL's need torchvision)"
        )
    return processor


def _parts(content: str) -> list[dict[str, str]]:
    """The parts of a message in the form that processors' templates take."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts

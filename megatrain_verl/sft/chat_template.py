"""Renders conversations with a tokenizer's own chat template and marks the tokens of assistant turns.

A template that marks what the model generates (`{% generation %}`) is taken at its word. With any other one, a turn
begins where the generation prompt after the messages before it ends, and ends where the rendering of the messages up
to it ends. Both renderings must begin the rendering of the whole conversation, as text and as tokens: what is trained
is then exactly what the model is asked to continue with.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatrain_verl.sft import tool_text
from megatrain_verl.sft.conversations import Conversation, Message, UnusableRow

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
NOTHING = "(?!)"  # a pattern that matches nowhere
PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}text of this turn"

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation, and for each whether it is trained (1) or not (0)."""

    input_ids: list[int]
    loss_mask: list[int]

    def cut(self, length: int) -> "Encoded":
        """The first `length` tokens."""
        return Encoded(self.input_ids[:length], self.loss_mask[:length])

    def columns(self) -> dict[str, Any]:
        """The row as the encoded file has it."""
        return {"input_ids": self.input_ids, "loss_mask": self.loss_mask, "length": len(self.input_ids)}


class ChatTemplate:
    """A tokenizer's chat template; `kwargs` are further variables of it (`enable_thinking` for instance).

    With `train_on_prompt` every token up to the last end-of-turn token is trained, whoever's turn it is in.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, train_on_prompt: bool = False, **kwargs: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; set model.custom_chat_template"
            )
        self._tokenizer, self._kwargs, self._train_on_prompt = tokenizer, kwargs, train_on_prompt
        special = sorted({*tokenizer.all_special_tokens, *_control_tokens(tokenizer)}, key=len, reverse=True)
        self._special_token = re.compile("|".join(map(re.escape, special)) or NOTHING)
        self.takes_tools = tool_text.is_rendered(self.render)
        self._check_plain_text()

    def encode(self, conversation: Conversation) -> Encoded:
        """Tokens of `conversation`; trained are its assistant turns, each with its end-of-turn token (or all of it).

        Tools are written into the messages as text if the template does not render them.

        Raises:
            UnusableRow: the template refuses the conversation, or a token spans the start of a turn.
            ValueError: the template's assistant turns cannot be told from the rest, or have no end-of-turn token.
        """
        if not self.takes_tools:
            conversation = tool_text.as_text(conversation)
        try:
            if self._train_on_prompt:
                text = self.render(conversation.messages, conversation.tools)
                turns = [(0, len(text))]
            else:
                text, turns = self._assistant_turns(conversation)
        except TemplateError as error:
            raise UnusableRow(f"the chat template refuses it: {error}") from error
        if not _is_unicode(text):
            raise UnusableRow("it has half a character (a lone surrogate)")
        boundaries = [place for start, end in turns for place in (start, self._closed(text, start, end))]
        input_ids, *before = self._tokenize([text, *(text[:place] for place in boundaries)], conversation)
        places = [_length_as_prefix(tokens, input_ids) for tokens in before]
        loss_mask = [0] * len(input_ids)
        for first, last in zip(places[::2], places[1::2], strict=True):
            loss_mask[first:last] = [1] * (last - first)
        loss_mask[0] = 0  # nothing precedes the first token that could predict it
        return Encoded(input_ids, loss_mask)

    def render(self, messages: list[Message], tools: list[dict[str, Any]], *, generation_prompt: bool = False) -> str:
        """The text of `messages`."""
        return self._tokenizer.apply_chat_template(
            self._shown(messages),
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._kwargs,
        )

    def _shown(self, messages: list[Message]) -> list[Message]:
        """The messages in the form that the template takes."""
        return messages

    def _check_plain_text(self) -> None:
        turns = [{"role": "user", "content": "probe_question"}, {"role": "assistant", "content": "probe_answer"}]
        try:
            text = self.render(turns, [])
        except TemplateError as error:
            text = str(error)
        if not all(turn["content"] in text for turn in turns):
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path} does not show messages of plain text; set "
                "model.custom_chat_template to one that does"
            )

    def _assistant_turns(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The whole text and where its assistant turns are."""
        messages, tools = conversation.messages, conversation.tools
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        template = self._tokenizer.get_chat_template(tools=tools or None)
        if GENERATION_MARK.search(template):
            text, spans = self._marked_turns(template, conversation)
        else:
            text = self.render(messages, tools)
            spans = [self._turn(text, conversation, index) for index in turns]
        ends = [0, *(end for _, end in spans)]
        if len(spans) < len(turns) or any(start < end for (start, _), end in zip(spans, ends, strict=False)):
            raise self._misaligned("does not show every assistant turn in its place", text)
        return text, spans

    def _marked_turns(self, template: str, conversation: Conversation) -> tuple[str, list[Span]]:
        (text,), (spans,) = render_jinja_template(
            conversations=[self._shown(conversation.messages)],
            tools=conversation.tools or None,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **self._kwargs},
        )
        return text, [span for span in spans if span[1] > span[0]]

    def _turn(self, text: str, conversation: Conversation, index: int) -> Span:
        messages, tools = conversation.messages, conversation.tools
        prompt = self.render(messages[:index], tools, generation_prompt=True)
        shown = self.render(messages[: index + 1], tools)
        if text.startswith(shown) and shown.startswith(prompt):
            return len(prompt), len(shown)
        return self._turn_in_context(text, conversation, index, prompt)

    def _turn_in_context(self, text: str, conversation: Conversation, index: int, prompt: str) -> Span:
        """Where a turn is that looks different once others follow it: templates drop earlier turns' thinking.

        A placeholder in its place shows in the whole conversation what comes before and after the turn's text, and in
        the conversation up to the turn what closes it.
        """
        messages, tools = conversation.messages, conversation.tools
        held = {"role": "assistant", "content": PLACEHOLDER}
        before, _, after = self.render([*messages[:index], held, *messages[index + 1 :]], tools).partition(PLACEHOLDER)
        alone = self.render([*messages[:index], held], tools).partition(PLACEHOLDER)[2]
        opening = prompt.removeprefix(self.render(messages[:index], tools))
        closing = self._up_to_special(os.path.commonprefix([after, alone]))
        if not closing or not text.endswith(after):
            raise self._misaligned(f"shows assistant turn {index + 1} differently when others follow", text)
        start = len(prompt) if before.startswith(prompt) else self._after_opening(before, opening)
        if start is None or not text.startswith(before[:start]):
            raise self._misaligned(f"prompts for assistant turn {index + 1} differently when others follow", text)
        return start, len(text) - len(after) + len(closing)

    def _after_opening(self, before: str, opening: str) -> int | None:
        """Where a turn's generated part begins, if its text follows `before` and the model is prompted by `opening`.

        `before` may end with a part of `opening` only (a prompt that opens the thinking), or go on after it (an empty
        thinking that the template adds).
        """
        parts = (opening[:length] for length in range(len(opening), 0, -1))
        if any(before.endswith(part) and self._up_to_special(part) for part in parts):
            return len(before)
        place = before.rfind(opening) if opening else -1
        return None if place < 0 else place + len(opening)

    def _up_to_special(self, text: str) -> str:
        """`text` up to its last special token; empty without one."""
        ends = [match.end() for match in self._special_token.finditer(text)]
        return text[: ends[-1]] if ends else ""

    def _closed(self, text: str, start: int, end: int) -> int:
        """The end of a turn's end-of-turn token; templates put white space after it that no model generates."""
        turn = text[start:end].rstrip()
        if len(self._up_to_special(turn)) != len(turn):
            raise self._misaligned(f"ends an assistant turn without an end-of-turn token (with {turn[-20:]!r})", text)
        return start + len(turn)

    def _misaligned(self, problem: str, text: str) -> ValueError:
        return ValueError(
            f"the chat template of {self._tokenizer.name_or_path} {problem}, so its assistant turns cannot be told "
            "from the rest; set model.custom_chat_template to one that does not, or that marks them by "
            f"{{% generation %}}. Rendered: {text[:200]!r}"
        )

    def _tokenize(self, texts: list[str], conversation: Conversation) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _length_as_prefix(tokens: list[int], whole: list[int]) -> int:
    """The number of `tokens`, which must be the first of `whole`."""
    if whole[: len(tokens)] != tokens:
        raise UnusableRow(
            "the chat template's generation prompt and a turn's text share a token (rows without thinking may need "
            "+data.apply_chat_template_kwargs.enable_thinking=false)"
        )
    return len(tokens)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]

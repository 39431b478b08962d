"""Which tokens of a rendered conversation are trained."""

import pytest

from megatrain_verl.sft.chat_template import ChatTemplate
from megatrain_verl.sft.conversations import Conversation, Message, UnusableRow
from tests.sft.cases import byte_tokenizer

THREE_TURNS = [
    ("system", "Be brief."),
    ("user", "One?"),
    ("assistant", "Answer 1 "),
    ("user", "Two?"),
    ("assistant", "Answer 2\n"),
    ("user", "Three?"),
    ("assistant", "Answer 3"),
]
SEARCH = {"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": {}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "search", "arguments": {"text": "tea"}}}
TOOL_CHAT = [
    {"role": "user", "content": "Tea?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "green", "name": "search", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "Green tea."},
]


def conversation(turns: list[tuple[str, str]]) -> Conversation:
    return Conversation([{"role": role, "content": text} for role, text in turns], [])


def pieces(template: str, chat: Conversation, **options: bool) -> list[tuple[str, bool]]:
    """The text of `chat` as `template` renders it, cut where training begins or ends."""
    tokenizer = byte_tokenizer(template, **options)
    encoded = ChatTemplate(tokenizer).encode(chat)
    assert len(encoded.input_ids) == len(encoded.loss_mask)
    cut: list[tuple[list[int], bool]] = []
    for token, trained in zip(encoded.input_ids, encoded.loss_mask, strict=True):
        if not cut or cut[-1][1] != bool(trained):
            cut.append(([], bool(trained)))
        cut[-1][0].append(token)
    return [(tokenizer.decode(tokens), trained) for tokens, trained in cut]


def trained(template: str, chat: Conversation) -> list[str]:
    return [text for text, is_trained in pieces(template, chat) if is_trained]


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_three_turn_chat_trains_each_answer_with_its_end_token_and_nothing_else(template: str) -> None:
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert pieces(template, conversation(THREE_TURNS)) == [
        (f"{start}system\nBe brief.{end}{start}user\nOne?{end}{start}assistant\n", False),
        ("Answer 1 <|im_end|>", True),
        (f"\n{start}user\nTwo?{end}{start}assistant\n", False),
        ("Answer 2\n<|im_end|>", True),
        (f"\n{start}user\nThree?{end}{start}assistant\n", False),
        ("Answer 3<|im_end|>", True),
        ("\n", False),
    ]


@pytest.mark.parametrize("template", ["chatml", "marked", "drops thinking"])
def test_tokens_are_those_of_the_whole_rendering(template: str) -> None:
    tokenizer, chat = byte_tokenizer(template), conversation(THREE_TURNS)
    whole = tokenizer.apply_chat_template(chat.messages, tokenize=True, return_dict=True)["input_ids"]
    assert ChatTemplate(tokenizer).encode(chat).input_ids == whole


def test_template_that_drops_earlier_thinking_aligns() -> None:
    turns = [
        (role, f"<think>\nhm {text}\n</think>\n\n{text}" if role == "assistant" else text) for role, text in THREE_TURNS
    ]
    answers = ["Answer 1 <|im_end|>", "Answer 2\n<|im_end|>"]
    last = "<think>\nhm Answer 3\n</think>\n\nAnswer 3<|im_end|>"
    assert trained("drops thinking", conversation(turns)) == [*answers, last]
    # Without thinking in the data the template adds an empty one, which is no part of the generation prompt.
    assert trained("drops thinking", conversation(THREE_TURNS)) == [
        *answers,
        "<think>\n\n</think>\n\nAnswer 3<|im_end|>",
    ]


def test_thinking_that_the_prompt_closes_is_not_trained() -> None:
    tokenizer, chat = byte_tokenizer("prompts to think", merge_newlines=True), conversation(THREE_TURNS)
    with pytest.raises(UnusableRow, match="share a token .*enable_thinking=false"):
        ChatTemplate(tokenizer).encode(chat)
    encoded = ChatTemplate(tokenizer, enable_thinking=False).encode(chat)
    tokens = [token for token, trained in zip(encoded.input_ids, encoded.loss_mask, strict=True) if trained]
    assert tokenizer.decode(tokens) == "Answer 1 <|im_end|>Answer 2\n<|im_end|>Answer 3<|im_end|>"
    assert tokenizer.decode(encoded.input_ids).count("</think>") == 1


def test_template_shows_tools_in_its_own_way() -> None:
    shown = pieces("tools", Conversation(TOOL_CHAT, [SEARCH]))
    assert [text for text, is_trained in shown if is_trained] == [
        'CALL {"name": "search", "arguments": {"text": "tea"}}<|im_end|>',
        "Green tea.<|im_end|>",
    ]
    assert '"description": "Finds."' in shown[0][0] and "<|im_start|>tool\ngreen" in shown[2][0]


def test_tools_become_text_for_a_template_that_does_not_show_them() -> None:
    shown = pieces("chatml", Conversation(TOOL_CHAT, [SEARCH]))
    assert [text for text, is_trained in shown if is_trained] == [
        '<tool_call>\n{"name": "search", "arguments": {"text": "tea"}}\n</tool_call><|im_end|>',
        "Green tea.<|im_end|>",
    ]
    assert shown[0][0].startswith("<|im_start|>system\n# Tools") and '"description": "Finds."' in shown[0][0]
    assert "<|im_start|>user\n<tool_response>\ngreen\n</tool_response><|im_end|>" in shown[2][0]


def test_several_results_are_one_turn_of_text() -> None:
    results: list[Message] = [{"role": "tool", "content": text} for text in ("green", "black")]
    shown = pieces("chatml", Conversation([*TOOL_CHAT[:2], *results, TOOL_CHAT[3]], []))
    responses = "<tool_response>\ngreen\n</tool_response>\n<tool_response>\nblack\n</tool_response>"
    assert f"user\n{responses}<|im_end|>" in shown[2][0]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "has no chat template; set model.custom_chat_template"),
        ("parts", "does not show messages of plain text"),
        ("no end of turn", "ends an assistant turn without an end-of-turn token"),
        ("numbers from the end", "differently when others follow.*set model.custom_chat_template"),
        ("ends the last turn differently", "shows assistant turn 3 differently when others follow"),
    ],
)
def test_template_that_cannot_be_aligned_fails_by_name(template: str | None, problem: str) -> None:
    tokenizer = byte_tokenizer(template)
    tokenizer.name_or_path = "models/broken"
    with pytest.raises(ValueError, match=f"(?s)models/broken.*{problem}"):
        ChatTemplate(tokenizer).encode(conversation(THREE_TURNS))


def test_row_that_the_template_refuses_is_unusable() -> None:
    with pytest.raises(UnusableRow, match="the chat template refuses it: no system role here"):
        ChatTemplate(byte_tokenizer("refuses system")).encode(conversation(THREE_TURNS))


def test_answer_that_shares_a_token_with_the_prompt_is_unusable() -> None:
    turns = [("user", "One?"), ("assistant", "\nAnswer")]
    assert pieces("chatml", conversation(turns))[1] == ("\nAnswer<|im_end|>", True)
    with pytest.raises(UnusableRow, match="share a token"):
        pieces("chatml", conversation(turns), merge_newlines=True)

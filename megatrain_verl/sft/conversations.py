"""Rows of alpaca and sharegpt data as conversations in the form that chat templates take."""

import json
from dataclasses import dataclass, field
from typing import Any

from megatrain_verl.sft.images import ImageSource, find_images
from megatrain_verl.sft.registry import DatasetEntry

Message = dict[str, Any]


class UnusableRow(Exception):
    """A row that cannot be trained on; the text is the reason by which such rows are counted."""


@dataclass(frozen=True)
class Conversation:
    """Messages with "role" and "content" (and "tool_calls"), the tools' JSON schemas, and images for the messages'
    `<image>` marks.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    images: list[ImageSource] = field(default_factory=list)


def to_conversation(
    row: dict[str, Any], columns: dict[str, str], entry: DatasetEntry, system_prompt: str = ""
) -> Conversation:
    """One row of `entry`, whose columns are `columns`: the format's name of each, and the file's.

    `system_prompt` is the system message of a row that has none.

    Raises:
        UnusableRow: a column or message that does not hold what the format says, or nothing to train.
    """
    if entry.formatting == "alpaca":
        messages = _alpaca(row, columns)
    else:
        messages = _sharegpt(row, columns, entry.tags)
    system = _text(row, columns["system"], required=False) if "system" in columns else ""
    system = system or system_prompt
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if messages[0]["role"] == "assistant" or [message["role"] for message in messages[:2]] == ["system", "assistant"]:
        raise UnusableRow("the first turn is an assistant turn")
    if messages[-1]["role"] != "assistant":
        raise UnusableRow("the last turn is not an assistant turn")
    tools = _tools(row, columns["tools"]) if "tools" in columns else []
    images = find_images(row.get(columns["images"]), entry.image_folder) if "images" in columns else []
    return Conversation(messages, tools, images)


def _alpaca(row: dict[str, Any], columns: dict[str, str]) -> list[Message]:
    turns = []
    history = row.get(columns["history"]) or [] if "history" in columns else []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise UnusableRow(f"column {columns['history']!r} is not a list of pairs of texts")
        turns.append(turn)
    query = _text(row, columns["query"], required=False) if "query" in columns else ""
    instruction = _text(row, columns["prompt"], required=not query)
    turns.append(("\n".join(part for part in (instruction, query) if part), _text(row, columns["response"])))
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _sharegpt(row: dict[str, Any], columns: dict[str, str], tags: dict[str, str]) -> list[Message]:
    column = columns["messages"]
    given = row.get(column)
    if not isinstance(given, list) or not given:
        raise UnusableRow(f"column {column!r} is not a list of messages")
    messages: list[Message] = []
    open_calls: list[dict[str, Any]] = []
    for message in given:
        role, text, calls = _tagged(message, tags, column)
        if role == "function_tag" or calls:
            open_calls = _tool_calls(calls or text, column, len(messages))
            shown = text if calls else ""
            messages.append({"role": "assistant", "content": shown, "tool_calls": list(open_calls)})
        elif role == "observation_tag":
            call = open_calls.pop(0) if open_calls else None
            answered = {"name": call["function"]["name"], "tool_call_id": call["id"]} if call else {}
            messages.append({"role": "tool", "content": text, **answered})
        else:
            messages.append({"role": role.removesuffix("_tag"), "content": text})
    return messages


def _tagged(message: Any, tags: dict[str, str], column: str) -> tuple[str, str, list[Any]]:
    """The kind of a message, as the name of its tag, its text, and the `tool_calls` of OpenAI's format."""
    if not isinstance(message, dict):
        raise UnusableRow(f"column {column!r} has a message that is not an object")
    for tag in ("role_tag", "content_tag"):
        if tags[tag] not in message:
            raise UnusableRow(f"column {column!r} has a message without {tags[tag]!r} (tags.{tag})")
    role, text = message[tags["role_tag"]], message[tags["content_tag"]]
    kinds = [tag for tag, name in tags.items() if name == role and tag not in ("role_tag", "content_tag")]
    if not kinds:
        raise UnusableRow(f"column {column!r} has a message from {str(role)[:40]!r}, which no tag names")
    calls = message.get("tool_calls") or [] if kinds[0] == "assistant_tag" else []
    if not isinstance(calls, list):
        raise UnusableRow(f"column {column!r} has tool_calls that are not a list")
    text = "" if text is None and calls else text
    if not isinstance(text, str):
        raise UnusableRow(f"column {column!r} has a message whose {tags['content_tag']!r} is not text")
    if kinds[0] == "assistant_tag" and not text.strip() and not calls:
        raise UnusableRow(f"column {column!r} has an assistant turn without text")
    return kinds[0], text, calls


def _tool_calls(given: str | list[Any], column: str, turn: int) -> list[dict[str, Any]]:
    """The calls of one turn; ids have nine characters, as Mistral's templates demand."""
    reason = f"column {column!r} has a function call that is not JSON with a name and arguments"
    calls = _json(given, reason) if isinstance(given, str) else given
    calls = calls if isinstance(calls, list) else [calls]
    if not calls:
        raise UnusableRow(reason)
    return [
        {"id": f"call{turn:03d}{number:02d}", "type": "function", "function": _function(call, reason)}
        for number, call in enumerate(calls)
    ]


def _function(call: Any, reason: str) -> dict[str, Any]:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]  # as OpenAI wraps it
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
        raise UnusableRow(reason)
    arguments = call["arguments"]
    arguments = _json(arguments, reason) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise UnusableRow(reason)
    return {"name": call["name"], "arguments": arguments}


def _json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UnusableRow(reason) from None


def _tools(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """Schemas of the tools, given as a list or as its JSON text, wrapped as chat templates expect them."""
    reason = f"column {column!r} is not a JSON list of tools"
    tools = row.get(column) or "[]"
    tools = _json(tools, reason) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRow(reason)
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _text(row: dict[str, Any], column: str, *, required: bool = True) -> str:
    value = row.get(column)
    if value is None:
        value = ""
    if not isinstance(value, str):
        raise UnusableRow(f"column {column!r} is not text")
    if required and not value.strip():
        raise UnusableRow(f"column {column!r} is empty")
    return value

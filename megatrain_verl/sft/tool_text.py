"""Tools, calls and their results as text in the messages, for chat templates that do not know tools.

The text is that of the Hermes and Qwen2.5 templates, so a rollout with verl's `hermes` tool parser reads the calls.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jinja2.exceptions import TemplateError

from megatrain_verl.sft.conversations import Conversation, Message

SYSTEM = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def is_rendered(render: Callable[[list[Message], list[dict[str, Any]]], str]) -> bool:
    """Whether a template shows tools, calls and results."""
    schema = {"type": "object", "properties": {"probe_argument": {"type": "string", "description": "probe_text"}}}
    function = {"name": "probe_tool", "description": "probe_description", "parameters": schema}
    call = {"name": "probe_tool", "arguments": {"probe_argument": "probe_value"}}
    answered = {"name": "probe_tool", "tool_call_id": "call00000"}
    messages = [
        {"role": "user", "content": "probe_question"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "probe_result", **answered},
        {"role": "assistant", "content": "probe_answer"},
    ]
    try:
        text = render(messages, [{"type": "function", "function": function}])
    except (TemplateError, TypeError):
        return False
    return all(part in text for part in ("probe_description", "probe_value", "probe_result"))


def as_text(conversation: Conversation) -> Conversation:
    """The same conversation without tools: they are part of the system message, calls and results of the turns."""
    messages: list[Message] = []
    for message in conversation.messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if messages[-1:] and messages[-1].get("holds_results"):  # several results are one user turn
                messages[-1]["content"] += f"\n{result}"
            else:
                messages.append({"role": "user", "content": result, "holds_results": True})
        elif "tool_calls" in message:
            messages.append({"role": "assistant", "content": "\n".join(map(_call, message["tool_calls"]))})
        else:
            messages.append(dict(message))
    messages = [{key: message[key] for key in ("role", "content")} for message in messages]
    if conversation.tools:
        tools = SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools))
        if messages[0]["role"] == "system":
            messages[0]["content"] += f"\n\n{tools}"
        else:
            messages.insert(0, {"role": "system", "content": tools})
    return replace(conversation, messages=messages, tools=[])


def _call(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"

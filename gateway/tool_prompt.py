"""Tools for a model whose chat template knows none: told in the first message, called and answered as text.

Pure. The form is the one of Hermes 2 Pro, which many models have seen and gateway.tool_calls reads.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = "You can call these functions. Each is described by a JSON object:"
_FORM = (
    "To call one, write a JSON object with its name and arguments between these tags, and nothing else:\n"
    '<tool_call>\n{"name": "the function\'s name", "arguments": {"an argument": "its value"}}\n</tool_call>'
)


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` that say all about `tools` themselves, in the roles that every template knows."""
    lines = [json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools]
    told = "\n".join([_INTRODUCTION, *lines, _FORM]) if tools else ""
    result = [_as_text(message) for message in messages]
    if result and result[0]["role"] == "system":
        result[0]["content"] = f"{result[0]['content']}\n\n{told}".strip()
        return result
    return [{"role": "system", "content": told}, *result] if told else result


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    result = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return result | {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
    return result | {"content": "\n".join(part for part in [message["content"], *calls] if part)}


def _call(function: Mapping[str, str]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"] or "{}"}}}\n</tool_call>'

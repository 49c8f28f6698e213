"""OpenAI's `tools` and `tool_choice` as a request gives them: read and checked. Knows no grammars and no templates."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from gateway.errors import InvalidRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Tool(Struct, frozen=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


class ToolChoice(Struct, frozen=True):
    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """OpenAI's `tools`, checked. Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"there are {len(tools)} tools; at most {MAX_TOOLS} can be given", param="tools")
    result: list[Tool] = []
    for i, tool in enumerate(tools):
        place = f"tools[{i}].function"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            text = f'tools[{i}] must be {{"type": "function", "function": {{…}}}}'
            raise InvalidRequest(text, param=f"tools[{i}]")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            text = f"{place}.name must be 1 to 64 letters, digits, underscores, dots or dashes"
            raise InvalidRequest(text, param=f"{place}.name")
        if any(name == other.name for other in result):
            raise InvalidRequest(f"{place}.name {name!r} is that of another tool, too", param=f"{place}.name")
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict):
            text = f"{place}.parameters must be a JSON schema (an object)"
            raise InvalidRequest(text, param=f"{place}.parameters")
        result.append(Tool(name, parameters, strict=function.get("strict") is True))
    return result


def read_tool_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """Raises InvalidRequest."""
    match choice:
        case None:
            return ToolChoice("auto" if tools else "none")
        case "none":
            return ToolChoice("none")
        case _ if not tools:
            raise InvalidRequest("tool_choice goes with tools only; leave it out", param="tool_choice")
        case "auto":
            return ToolChoice("auto")
        case "required":
            return ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in (tool.name for tool in tools):
                param = "tool_choice.function.name"
                raise InvalidRequest(f"{param} is {name[:64]!r}, which is not among the tools", param=param)
            return ToolChoice("named", name)
    text = 'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
    raise InvalidRequest(text, param="tool_choice")

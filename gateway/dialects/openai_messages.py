"""The messages of a conversation: what each role may say, as templates take it. Texts only."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from gateway.errors import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_MESSAGES = 4096


class Part(Struct):
    type: str
    text: str | None = None


class FunctionCall(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str  # JSON, as a rule
    parsed_arguments: Any = None  # the OpenAI SDK's own reading of it


class ToolCall(Struct, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: str | None = None
    index: int | None = None


class Message(Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what clients send back of an answer they got; nothing in it means anything here
    refusal: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    audio: None = None
    function_call: None = None


def read_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Raises InvalidRequest, naming the message."""
    if not messages:
        raise InvalidRequest("messages is empty; give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        text = f"messages has {len(messages)} items; at most {MAX_MESSAGES} are allowed"
        raise InvalidRequest(text, param="messages")
    return [_read(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read(place: str, message: Message) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        text = f"{place}.role is {message.role[:50]!r}; it may be {', '.join(ROLES)}"
        raise InvalidRequest(text, param=f"{place}.role")
    _check_belongs(place, role, message)
    result: dict[str, Any] = {"role": role, "content": _read_content(place, message)}
    if message.name is not None:
        result["name"] = message.name
    if message.reasoning_content is not None:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return result


def _check_belongs(place: str, role: str, message: Message) -> None:
    """Fields that go with one role only."""
    for name, belongs in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) is not None and role != belongs:
            text = f"{place}.{name} goes with the role {belongs} only; leave it out"
            raise InvalidRequest(text, param=f"{place}.{name}")
    if role == "tool" and message.tool_call_id is None:
        text = f"{place}.tool_call_id is missing; name the call that this is the result of"
        raise InvalidRequest(text, param=f"{place}.tool_call_id")
    for i, call in enumerate(message.tool_calls or ()):
        if call.type not in (None, "function"):
            name = f"{place}.tool_calls[{i}].type"
            raise InvalidRequest(f"{name} is {call.type[:50]!r}; it may be function", param=name)


def _read_content(place: str, message: Message) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InvalidRequest(f"{place}.content is missing; give a text", param=f"{place}.content")
    texts = []
    for i, part in enumerate(content):
        name = f"{place}.content[{i}]"
        if part.type != "text":
            text = f"{name}.type is {part.type[:50]!r}; this model takes text only"
            raise InvalidRequest(text, param=f"{name}.type", code="unsupported")
        if part.text is None:
            raise InvalidRequest(f"{name}.text is missing; give a text", param=f"{name}.text")
        texts.append(part.text)
    if not texts:
        raise InvalidRequest(f"{place}.content is an empty list; give a text", param=f"{place}.content")
    return "\n".join(texts)

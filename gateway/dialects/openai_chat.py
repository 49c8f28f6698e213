"""OpenAI's /v1/chat/completions, with the sampling fields of vLLM."""

from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from gateway.dialects.decode import decode
from gateway.dialects.fields import refuse_unknown
from gateway.dialects.openai_messages import Message, read_messages
from gateway.dialects.openai_sampling import (
    Positive,
    SamplingBody,
    read_include_usage,
    read_left_open,
    read_sampling,
    read_stop,
    usage_object,
)
from gateway.dialects.openai_structure import read_structure
from gateway.errors import InvalidRequest
from gateway.schema_bounds import check_depth
from gateway.tasks import ChatPrompt, GenerateOutcome, GenerateTask, Head, Piece, TokenInfo, ToolUse, Usage
from gateway.tool_calls import ArgumentsDelta, CallStart
from gateway.tools import read_tool_choice, read_tools


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_completion_tokens: Positive | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(ChatBody)


def parse_chat(body: bytes) -> GenerateTask:
    """Raises InvalidRequest."""
    fields = decode(_decoder, body)
    refuse_unknown(ChatBody, body)
    tools = _read_tools(fields)
    structure = read_structure(fields)
    if tools is not None and structure is not None:
        text = f"{structure.param} and tools exclude each other; leave one out or set tool_choice to none"
        raise InvalidRequest(text, param=structure.param)
    return GenerateTask(
        model=fields.model,
        prompts=[],
        chat=_read_prompt(fields, tools),
        sampling=read_sampling(fields, _read_logprobs(fields)),
        left_open=read_left_open(fields),
        structure=structure,
        tools=tools,
        n=fields.n or 1,
        max_tokens=_read_max_tokens(fields),
        stop=read_stop(fields),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        stream=bool(fields.stream),
        include_usage=read_include_usage(fields),
        cache_salt=fields.cache_salt,
    )


def _read_prompt(fields: ChatBody, tools: ToolUse | None) -> ChatPrompt:
    messages = read_messages(fields.messages)
    check_depth(fields.chat_template_kwargs or {}, "chat_template_kwargs")
    going_on = bool(fields.continue_final_message)
    if going_on:
        if fields.add_generation_prompt:
            text = "add_generation_prompt and continue_final_message exclude each other; leave one out"
            raise InvalidRequest(text, param="continue_final_message")
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
            text = "continue_final_message needs a last message of the assistant that has content"
            raise InvalidRequest(text, param="continue_final_message")
    return ChatPrompt(
        messages=messages,
        tools=[] if tools is None else fields.tools or [],
        add_generation_prompt=not going_on and fields.add_generation_prompt is not False,
        continue_final_message=going_on,
        template_kwargs=fields.chat_template_kwargs or {},
    )


def _read_tools(fields: ChatBody) -> ToolUse | None:
    """None where the model is to call nothing; the tools are checked all the same."""
    tools = read_tools(fields.tools or [])
    for i, tool in enumerate(fields.tools or ()):
        check_depth(tool, f"tools[{i}]")
    choice = read_tool_choice(fields.tool_choice, tools)
    if choice.mode == "none":
        return None
    return ToolUse(tools, choice, fields.parallel_tool_calls is not False)


def _read_logprobs(fields: ChatBody) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise InvalidRequest("top_logprobs goes with logprobs only; set it to true", param="top_logprobs")
    return None


def _read_max_tokens(fields: ChatBody) -> int | None:
    if fields.max_tokens == 0:
        raise InvalidRequest("max_tokens is 0; give at least 1", param="max_tokens")
    given = {value for value in (fields.max_tokens, fields.max_completion_tokens) if value is not None}
    if len(given) > 1:
        text = "max_tokens and max_completion_tokens are the same thing and differ; leave one out"
        raise InvalidRequest(text, param="max_completion_tokens")
    return given.pop() if given else None


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────


def render_chat(task: GenerateTask, outcome: GenerateOutcome) -> bytes:
    choices = []
    for i, pieces in enumerate(outcome.choices):
        calls = _whole_calls(pieces)
        content = "".join(piece.text for piece in pieces)
        reasoning = "".join(piece.reasoning for piece in pieces)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        tokens = [token for piece in pieces for token in piece.tokens]
        choices.append(
            {
                "index": i,
                "message": message,
                "logprobs": _logprobs(task, tokens),
                "finish_reason": pieces[-1].finish_reason,
            }
        )
    head = _head(task, outcome.head, "chat.completion")
    return orjson.dumps(head | {"choices": choices, "usage": usage_object(outcome.usage)})


class ChatEvents:
    """The same answer as server-sent events."""

    def __init__(self, task: GenerateTask, head: Head) -> None:
        self._task = task
        self._head = _head(task, head, "chat.completion.chunk")
        self._more = {"usage": None} if task.include_usage else {}

    def pieces(self, pieces: list[Piece]) -> bytes:
        return b"".join(
            b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [self._choice(piece)], **self._more})
            for piece in pieces
        )

    def usage(self, usage: Usage) -> bytes:
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [], "usage": usage_object(usage)})

    def _choice(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.first:
            delta["role"] = "assistant"
        if piece.text or (piece.first and not piece.calls):
            delta["content"] = piece.text
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.calls:
            delta["tool_calls"] = _call_deltas(piece)
        return {
            "index": piece.choice,
            "delta": delta,
            "logprobs": _logprobs(self._task, piece.tokens) if piece.tokens else None,
            "finish_reason": piece.finish_reason,
        }


def _call_deltas(piece: Piece) -> list[dict[str, Any]]:
    """One entry a call: what is new of it."""
    deltas: dict[int, dict[str, Any]] = {}
    for event in piece.calls:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            deltas[event.index] = {"index": event.index, "id": event.id, "type": "function", "function": function}
        else:
            entry = deltas.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            entry["function"]["arguments"] += event.text
    return list(deltas.values())


def _whole_calls(pieces: list[Piece]) -> list[dict[str, Any]]:
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        for event in piece.calls:
            match event:
                case CallStart():
                    starts.append(event)
                    arguments.append([])
                case ArgumentsDelta(index=index, text=text):
                    arguments[index].append(text)
    return [
        {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": "".join(texts)}}
        for start, texts in zip(starts, arguments, strict=True)
    ]


def _head(task: GenerateTask, head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": task.model}


def _logprobs(task: GenerateTask, tokens: list[TokenInfo]) -> dict[str, Any] | None:
    if task.sampling.logprobs is None:
        return None
    content = [
        {
            **_token(token.text, token.bytes, token.logprob),
            "top_logprobs": [_token(top.text, top.bytes, top.logprob) for top in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}

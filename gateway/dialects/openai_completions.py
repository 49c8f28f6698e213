"""OpenAI's /v1/completions, with the sampling fields of vLLM."""

from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from gateway.dialects.decode import decode
from gateway.dialects.fields import Texts, read_texts, refuse_unknown
from gateway.dialects.openai_sampling import (
    SamplingBody,
    read_include_usage,
    read_left_open,
    read_sampling,
    read_stop,
    usage_object,
)
from gateway.dialects.openai_structure import read_structure
from gateway.errors import InvalidRequest
from gateway.tasks import GenerateOutcome, GenerateTask, Head, Piece, TokenInfo, Usage

USUAL_MAX_TOKENS = 16


class CompletionsBody(SamplingBody, kw_only=True):
    prompt: Texts
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


_decoder = msgspec.json.Decoder(CompletionsBody)


def parse_completions(body: bytes) -> GenerateTask:
    """Raises InvalidRequest."""
    fields = decode(_decoder, body)
    refuse_unknown(CompletionsBody, body)
    echo = bool(fields.echo)
    if fields.max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens is 0; give at least 1, or set echo", param="max_tokens")
    return GenerateTask(
        model=fields.model,
        prompts=read_texts("prompt", fields.prompt),
        sampling=read_sampling(fields, fields.logprobs, fields.logprobs if echo else None),
        left_open=read_left_open(fields),
        n=fields.n or 1,
        max_tokens=fields.max_tokens,
        usual_max_tokens=USUAL_MAX_TOKENS,
        stop=read_stop(fields),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        echo=echo,
        stream=bool(fields.stream),
        include_usage=read_include_usage(fields),
        cache_salt=fields.cache_salt,
        structure=read_structure(fields),
    )


def render_completions(task: GenerateTask, outcome: GenerateOutcome) -> bytes:
    choices = []
    for i, pieces in enumerate(outcome.choices):
        tokens = [token for piece in pieces for token in piece.tokens]
        text = "".join(piece.text for piece in pieces)
        choices.append(_choice(task, i, text, tokens, pieces[-1].finish_reason))
    return orjson.dumps(_head(task, outcome.head) | {"choices": choices, "usage": usage_object(outcome.usage)})


class CompletionEvents:
    """The same answer as server-sent events."""

    def __init__(self, task: GenerateTask, head: Head) -> None:
        self._task = task
        self._head = _head(task, head)
        self._more = {"usage": None} if task.include_usage else {}

    def pieces(self, pieces: list[Piece]) -> bytes:
        events = []
        for piece in pieces:
            choice = _choice(self._task, piece.choice, piece.text, piece.tokens, piece.finish_reason)
            events.append(b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [choice], **self._more}))
        return b"".join(events)

    def usage(self, usage: Usage) -> bytes:
        return b"data: %b\n\n" % orjson.dumps({**self._head, "choices": [], "usage": usage_object(usage)})


def _head(task: GenerateTask, head: Head) -> dict[str, Any]:
    return {"id": f"cmpl-{head.id}", "object": "text_completion", "created": head.created, "model": task.model}


def _choice(
    task: GenerateTask, index: int, text: str, tokens: list[TokenInfo], finish_reason: str | None
) -> dict[str, Any]:
    logprobs = None if task.sampling.logprobs is None else _logprobs(tokens)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: list[TokenInfo]) -> dict[str, Any]:
    """OpenAI's four lists. The token itself is among the likeliest ones even if it is not one of them."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None
            if token.logprob is None
            else {top.text: top.logprob for top in token.top} | {token.text: token.logprob}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }

"""Completions over HTTP, streamed and not, against a scheduler that says what it is told to."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Stack, byte_tokenizer

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


async def complete(stack: Stack, prompt: object = "hello", **fields: object) -> tuple[int, Any]:
    return await stack.post("/v1/completions", {"model": "chat", "prompt": prompt, **fields})


async def events(stack: Stack, path: str = "/v1/completions", **fields: object) -> list[Any]:
    """Data of all events of a stream, which ends as it should."""
    async with stack.http.post(path, json={"model": "chat", "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = (await response.text()).split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2] if not part.startswith(":")]


def text_of(found: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for event in found for c in event["choices"] if c["index"] == index)


async def test_completes_a_string(chat_stack: Stack) -> None:
    status, body = await complete(chat_stack, "hello the", max_tokens=4)
    assert status == 200, body
    assert body["object"] == "text_completion"
    assert body["model"] == "chat"
    assert body["id"].startswith("cmpl-")
    text = TOKENIZER.decode((ids("hello the") * 4)[:4])
    assert body["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert chat_stack.schedulers["chat/0"].sequences == [ids("hello the")]


async def test_streams_the_same(chat_stack: Stack) -> None:
    _, body = await complete(chat_stack, "hello the", max_tokens=12)
    found = await events(chat_stack, prompt="hello the", max_tokens=12, stream_options={"include_usage": True})
    assert text_of(found) == body["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]] == [None] * 11 + ["length"]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == body["usage"]
    assert len({event["id"] for event in found}) == 1


@pytest.mark.parametrize(("given", "rows"), [([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])])
async def test_token_ids_are_taken_as_given(chat_stack: Stack, given: list[object], rows: list[list[int]]) -> None:
    status, body = await complete(chat_stack, given, max_tokens=3)
    assert status == 200
    assert chat_stack.schedulers["chat/0"].sequences == rows
    assert [c["text"] for c in body["choices"]] == [TOKENIZER.decode((row * 3)[:3]) for row in rows]
    assert body["usage"]["prompt_tokens"] == sum(map(len, rows))

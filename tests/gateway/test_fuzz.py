"""Random bodies and odd requests: never a 5xx, always JSON, and a good request in between is right."""

import json
import random
from typing import Any

import pytest

from tests.gateway.conftest import Stack
from tests.gateway.test_bad_input import RERANK, SCORE, check_shape, embed, good_still_right, raw

VALUES: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 2**70, 1.5, 1e300, "", " ", "a", "\x00", "\ud83c\udf37", [], [[]], [""],
    [0], [-1], [2**40], ["a", 1], [["a"]], [[1], ["a"]], [None], {}, {"text": "a"}, {"text": None}, ["a"] * 50,
    [1] * 50, [{"text": "a"}, "b"], [["a", "b"]], [[1, 2], [3]], "x" * 10_000, [[[]]],
]  # fmt: skip
NAMES = {
    "/v1/embeddings": ["model", "input", "encoding_format", "dimensions", "user", "truncate", "prompt_name", "extra"],
    "/v1/rerank": ["model", "query", "documents", "pairs", "type_starts", "top_n", "return_documents", "instruction"],
    "/v1/score": ["model", "text_1", "text_2", "pairs", "type_starts", "truncate", "instruction", "user"],
}


@pytest.mark.parametrize("seed", range(3))
async def test_random_bodies(stack: Stack, seed: int) -> None:
    rng = random.Random(seed)
    bases = {"/v1/embeddings": embed(), "/v1/rerank": RERANK, "/v1/score": SCORE}
    statuses = set()
    for i in range(300):
        path = rng.choice(sorted(bases))
        body = dict(bases[path])
        for name in rng.sample(NAMES[path], rng.choice([1, 1, 2, 3])):
            if rng.random() < 0.1:
                body.pop(name, None)
            else:
                body[name] = rng.choice(VALUES)
        status, answer = await stack.post(path, body)
        statuses.add(status)
        if status == 200:
            assert answer["object"] == "list"
        else:
            assert status in (400, 404, 413), (path, body, answer)
            check_shape(answer)
        if i % 20 == 0:
            await good_still_right(stack)
    assert {200, 400} <= statuses


async def test_random_bytes(stack: Stack) -> None:
    rng = random.Random(0)
    text = json.dumps(embed(input=["a", "b"], dimensions=4)).encode()
    for _ in range(300):
        body = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        async with stack.http.post(
            "/v1/embeddings", data=bytes(body), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status in (200, 400, 404, 413), (body, await response.text())
            json.loads(await response.read())
    await good_still_right(stack)


@pytest.mark.parametrize(
    "line",
    [
        b"OPTIONS * HTTP/1.1",
        b"CONNECT example.com:443 HTTP/1.1",
        b"GET http://example.com/v1/nope HTTP/1.1",
        b"GET //v1/embeddings HTTP/1.1",
        b"GET /%ff%00 HTTP/1.1",
        b"GET /v1/../../etc/passwd HTTP/1.1",
        b"GET /?a=%zz HTTP/1.1",
        b"GET / HTTP/1.0",
        b"BREW /health/live HTTP/1.1",
        b"TRACE /v1/embeddings HTTP/1.1",
    ],
)
async def test_odd_request_lines(stack: Stack, line: bytes) -> None:
    status, headers, body = await raw(stack, line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert status in (400, 404, 405)
    assert headers[b"Content-Type"] == b"application/json"
    check_shape(json.loads(body))
    await good_still_right(stack)

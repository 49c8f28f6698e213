"""Whatever a client sends: an error in OpenAI's shape that names the field, and the next good request is right."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.dialects.openai import parse_embeddings
from gateway.errors import InvalidRequest
from tests.gateway.conftest import MakeStack, Stack, tiny_tokenizer, until
from tests.gateway.fake_scheduler import facts, vector

RERANK: dict[str, Any] = {"model": "tiny", "query": "q", "documents": ["a", "b"]}
SCORE: dict[str, Any] = {"model": "tiny", "text_1": "q", "text_2": ["a", "b"]}


async def good_still_right(stack: Stack) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    status, body = await stack.embed("hello world")
    assert status == 200
    np.testing.assert_allclose(body["data"][0]["embedding"], vector(tokenizer.encode("hello world").ids), rtol=1e-6)


def check_shape(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["param"] or "") in error["message"]  # some clients show nothing else
    assert error["type"]
    assert error["code"]
    return error


def embed(**fields: object) -> dict[str, object]:
    return {"model": "tiny", "input": "hello"} | fields


CASES = [
    # embeddings: path, body, status, param
    ("/v1/embeddings", {"input": "a"}, 400, "model"),
    ("/v1/embeddings", {"model": "tiny"}, 400, "input"),
    ("/v1/embeddings", embed(model=None), 400, "model"),
    ("/v1/embeddings", embed(model=3), 400, "model"),
    ("/v1/embeddings", embed(model="nope"), 404, "model"),
    ("/v1/embeddings", embed(model=""), 404, "model"),
    ("/v1/embeddings", embed(input=None), 400, "input"),
    ("/v1/embeddings", embed(input=[]), 400, "input"),
    ("/v1/embeddings", embed(input=""), 400, "input"),
    ("/v1/embeddings", embed(input=["a", ""]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=[[1], []]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=[[]]), 400, "input[0]"),
    ("/v1/embeddings", embed(input=["a", 1]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=[1, "a"]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=[[1], "a"]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=["a", None]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=[[1, "a"]]), 400, "input[0][1]"),
    ("/v1/embeddings", embed(input=[[[1]]]), 400, "input[0][0]"),
    ("/v1/embeddings", embed(input=[1.5]), 400, "input[0]"),
    ("/v1/embeddings", embed(input=[True]), 400, "input[0]"),
    ("/v1/embeddings", embed(input={"text": "a"}), 400, "input"),
    ("/v1/embeddings", embed(input=5), 400, "input"),
    ("/v1/embeddings", embed(input=[-1]), 400, "input[0]"),
    ("/v1/embeddings", embed(input=[1000]), 400, "input[0]"),
    ("/v1/embeddings", embed(input=[[1], [1, 999, 1000]]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=[2**31]), 400, "input[0]"),
    ("/v1/embeddings", embed(input=[2**70]), 400, "input[0]"),
    ("/v1/embeddings", embed(input=[1] * 33), 400, "input[0]"),
    ("/v1/embeddings", embed(input=["a", "red " * 40]), 400, "input[1]"),
    ("/v1/embeddings", embed(input=["a", "x" * 9000]), 413, "input[1]"),
    ("/v1/embeddings", embed(input=["a"] * 2049), 413, "input"),
    ("/v1/embeddings", embed(encoding_format=""), 400, "encoding_format"),
    ("/v1/rerank", RERANK | {"type_starts": [1]}, 400, "type_starts"),
    ("/v1/score", SCORE | {"type_starts": [1]}, 400, "type_starts"),
    ("/v1/score", SCORE | {"text_1": ["a"] * 2049, "text_2": "b"}, 413, "text_1"),
    ("/v1/score", SCORE | {"text_2": ["a"] * 2049}, 413, "text_2"),
    ("/v1/score", {"model": "tiny", "pairs": [["a", "b"]] * 2049}, 413, "pairs"),
    ("/v1/embeddings", embed(dimensions=0), 400, "dimensions"),
    ("/v1/embeddings", embed(dimensions=-1), 400, "dimensions"),
    ("/v1/embeddings", embed(dimensions=17), 400, "dimensions"),
    ("/v1/embeddings", embed(dimensions=2**70), 400, "dimensions"),
    ("/v1/embeddings", embed(dimensions=2.5), 400, "dimensions"),
    ("/v1/embeddings", embed(dimensions="4"), 400, "dimensions"),
    ("/v1/embeddings", embed(encoding_format="hex"), 400, "encoding_format"),
    ("/v1/embeddings", embed(encoding_format=1), 400, "encoding_format"),
    ("/v1/embeddings", embed(user=1), 400, "user"),
    ("/v1/embeddings", embed(truncate="yes"), 400, "truncate"),
    ("/v1/embeddings", embed(prompt_name=1), 400, "prompt_name"),
    ("/v1/embeddings", embed(prompt_name="nope"), 400, "prompt_name"),
    ("/v1/embeddings", embed(input_type="query"), 400, "input_type"),
    ("/v1/embeddings", [1], 400, None),
    ("/v1/embeddings", "text", 400, None),
    # rerank
    ("/v1/rerank", RERANK | {"query": None}, 400, "query"),
    ("/v1/rerank", RERANK | {"query": ""}, 400, "query"),
    ("/v1/rerank", RERANK | {"query": ["q"]}, 400, "query[0]"),
    ("/v1/rerank", RERANK | {"documents": None}, 400, "documents"),
    ("/v1/rerank", RERANK | {"documents": []}, 400, "documents"),
    ("/v1/rerank", RERANK | {"documents": "a"}, 400, "documents"),
    ("/v1/rerank", RERANK | {"documents": ["a", ""]}, 400, "documents[1]"),
    ("/v1/rerank", RERANK | {"documents": ["a", {"text": ""}]}, 400, "documents[1]"),
    ("/v1/rerank", RERANK | {"documents": ["a", {}]}, 400, "documents[1].text"),
    ("/v1/rerank", RERANK | {"documents": ["a", {"text": 3}]}, 400, "documents[1].text"),
    ("/v1/rerank", RERANK | {"documents": ["a", [1]]}, 400, "documents[1]"),
    ("/v1/rerank", RERANK | {"documents": ["a"] * 2049}, 413, "documents"),
    ("/v1/rerank", RERANK | {"top_n": 0}, 400, "top_n"),
    ("/v1/rerank", RERANK | {"top_n": "2"}, 400, "top_n"),
    ("/v1/rerank", RERANK | {"return_documents": 1}, 400, "return_documents"),
    ("/v1/rerank", RERANK | {"documents": [[1]], "return_documents": True}, 400, "return_documents"),
    ("/v1/rerank", RERANK | {"rank_fields": ["title"]}, 400, "rank_fields"),
    ("/v1/rerank", RERANK | {"pairs": [["a", "b"]]}, 400, "query"),
    ("/v1/rerank", {"model": "tiny", "pairs": []}, 400, "pairs"),
    ("/v1/rerank", {"model": "tiny", "pairs": [[1, 2]]}, 400, "pairs"),  # an embedding model takes no joined ids
    ("/v1/rerank", {"model": "tiny", "pairs": [["a"]]}, 400, "pairs[0]"),
    ("/v1/rerank", {"model": "tiny", "pairs": [["a", "b"], [1, 2]]}, 400, "pairs[1]"),
    ("/v1/rerank", {"model": "tiny", "pairs": [["a", ""]]}, 400, "pairs[0]"),
    ("/v1/rerank", {"model": "tiny", "pairs": [[]]}, 400, "pairs[0]"),
    # score
    ("/v1/score", SCORE | {"text_1": None}, 400, "text_1"),
    ("/v1/score", SCORE | {"text_2": []}, 400, "text_2"),
    ("/v1/score", SCORE | {"text_1": ["a", "b", "c"]}, 400, "text_2"),
    ("/v1/score", SCORE | {"text_2": ["a", ""]}, 400, "text_2[1]"),
    ("/v1/score", SCORE | {"text_2": ["a", 5]}, 400, "text_2[1]"),
    ("/v1/score", SCORE | {"text_2": [[1000]]}, 400, "text_2[0]"),
    ("/v1/score", {"model": "tiny", "pairs": [["a", "b"]], "type_starts": [1]}, 400, "type_starts"),
    # elsewhere
    ("/nope", {}, 404, None),
    ("/v1", {}, 404, None),
    ("/v1/embeddings/", {}, 404, None),
    ("/v1/models", {}, 405, None),
    ("/metrics", {}, 405, None),
]


async def test_every_bad_body_is_told_and_forgotten(stack: Stack) -> None:
    await until(lambda: bool(stack.schedulers["tiny/0"].gateways))
    for path, body, status, param in CASES:
        found, answer = await stack.post(path, body)
        assert found == status, (path, body, answer)
        assert check_shape(answer)["param"] == param, (path, body, answer)
        await good_still_right(stack)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", None, "the body is empty; send a JSON object"),
        (b" \n", None, "the body is empty; send a JSON object"),
        (b"[1]", None, "the body must be an object, not a list"),
        (b"null", None, "the body must be an object, not null"),
        (b"{", None, "the body is not valid JSON: it ends too early"),
        (b"{}", "model", "model is missing; give it"),
        (b'{"model": "m", "input": "a", "dimensions": 0}', "dimensions", "dimensions must be a whole number >= 1"),
        (b'{"model": "m", "input": {}}', "input", "input must be a string or a list, not an object"),
        (b'{"model": "m", "input": NaN}', "input", "input is NaN, which JSON does not have; leave it out or"),
        (b'{"model": "m", "input": -Infinity}', "input", "input is -Infinity, which JSON does not have; leave it out"),
        (b'{"model": "m", "input": ["a", NaN]}', None, "a value at byte 30 is NaN, which JSON does not have"),
        (b'{"model": "m", "input": "\\ud800"}', None, "the body is not valid JSON: an escape at its end is half of"),
        (
            b'{"model": "m", "input": "\\ud800 and on"}',
            None,
            "the body is not valid JSON: an escape at byte ",
        ),
        (
            b'{"model": "m", "input": "\\ude00 and on"}',
            None,
            "the body is not valid JSON: an escape at byte ",
        ),
        (b'{"model": "m", "input": "\\\\ud800', None, "the body is not valid JSON: it ends too early"),
        (b'{"model": "m", "input": nonsense}', None, "the body is not valid JSON: invalid character (byte 28)"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(body: bytes, param: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_embeddings(body)
    assert caught.value.message.startswith(message)
    assert caught.value.param == param


RAW_BODIES = [
    b"",
    b"null",
    b"{",
    b"nonsense",
    b'{"model": "tiny", "input": NaN}',
    b'{"model": "tiny", "input": [1e400]}',
    b'{"model": "tiny", "input": "\xff\xfe"}',
    b'{"model": "tiny", "input": "\\ud800"}',
    b'{"model": "tiny", "input": "a"} trailing',
    b'\xef\xbb\xbf{"model": "tiny", "input": "a"}',
    '{"model": "tiny", "input": "a"}'.encode("utf-16"),
    b'{"model": "tiny", "input": ' + b"[" * 100_000,
    b'{"model": "tiny", "input": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model": "tiny", "input": "a", "other": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'{"model": "tiny", "input": "a\x00b"}',
    b'{"model": "tiny", "input": "a", "dimensions": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("body", RAW_BODIES, ids=range(len(RAW_BODIES)))
async def test_what_is_not_json_is_a_400(stack: Stack, body: bytes) -> None:
    async with stack.http.post("/v1/embeddings", data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        check_shape(await response.json())
    await good_still_right(stack)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "x", "model": "tiny", "input": "a"}',  # the last one counts
        b'{"model": "tiny", "input": "a", "unknown": {"deep": [1, 2, 3]}}',
        b'{"model": "tiny", "input": "\\u0000"}',
        b'{"model": "tiny", "input": " \\t\\n"}',
        b'{"model": "tiny", "input": "\\ud83c\\udf37 \xd8\xb3\xd9\x84\xd8\xa7\xd9\x85 \xe6\x9d\xb1\xe4\xba\xac"}',
        b'{"model": "tiny", "input": "a", "dimensions": null, "input_type": null}',
    ],
)
async def test_what_looks_odd_but_is_fine(stack: Stack, body: bytes) -> None:
    async with stack.http.post("/v1/embeddings", data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ({"Content-Type": "text/plain"}, 415, "Content-Type"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415, "Content-Type"),
        ({"Content-Type": "application/json; charset=utf-8"}, 200, None),
        ({"Content-Type": "Application/JSON"}, 200, None),
        ({"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
        ({"Content-Encoding": "zstd"}, 415, "Content-Encoding"),
        ({"Content-Encoding": "identity"}, 200, None),
        ({"Upgrade": "websocket", "Connection": "Upgrade"}, 400, "Upgrade"),
        ({"X-Timeout-Ms": "soon"}, 400, "X-Timeout-Ms"),
        ({"X-Timeout-Ms": "0"}, 400, "X-Timeout-Ms"),
        ({"X-Timeout-Ms": "-5"}, 400, "X-Timeout-Ms"),
        ({"X-Timeout-Ms": "99999999999999999999"}, 400, "X-Timeout-Ms"),
        ({"X-Priority": "urgent"}, 400, "X-Priority"),
        ({"Expect": "100-continue"}, 200, None),
        ({"Expect": "miracles"}, 417, "Expect"),
    ],
)
async def test_headers_are_checked(stack: Stack, headers: dict[str, str], status: int, param: str | None) -> None:
    body = json.dumps(embed()).encode()
    async with stack.http.post(
        "/v1/embeddings", data=body, headers={"Content-Type": "application/json"} | headers
    ) as response:
        assert response.status == status, await response.text()
        if status != 200:
            assert check_shape(await response.json())["param"] == param
    await good_still_right(stack)


async def test_no_content_type_is_taken_for_json(stack: Stack) -> None:
    async with stack.http.post(
        "/v1/embeddings", data=json.dumps(embed()).encode(), skip_auto_headers=["Content-Type"]
    ) as response:
        assert response.status == 200


async def raw(stack: Stack, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Sends bytes, reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), {k.strip(): v.strip() for k, _, v in (line.partition(b":") for line in lines)}, body


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /v1/embeddings HTTP/9.9\r\nHost: x\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 10_000 + b"\r\n\r\n",
    ],
)
async def test_bad_http_is_a_json_400(stack: Stack, data: bytes) -> None:
    status, headers, body = await raw(stack, data)
    assert status == 400
    assert headers[b"Content-Type"] == b"application/json"
    check_shape(json.loads(body))
    await good_still_right(stack)


@pytest.mark.parametrize(("coding", "status"), [(b"gzip, chunked", 415), (b"chunked", 200), (b"Chunked", 200)])
async def test_a_body_in_another_transfer_coding_is_not_taken_for_plain(
    stack: Stack, coding: bytes, status: int
) -> None:
    content = json.dumps(embed()).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: " + coding
    answered, _, body = await raw(stack, head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))
    assert answered == status
    if status != 200:
        assert check_shape(json.loads(body))["param"] == "Transfer-Encoding"
    await good_still_right(stack)


@pytest.mark.parametrize("side", ["text_1", "text_2"])
async def test_an_empty_side_is_called_what_it_is(stack: Stack, side: str) -> None:
    for empty, told in (([], f"{side} is empty"), ("", f"{side} is an empty string")):
        async with stack.http.post("/v1/score", json=SCORE | {side: empty}) as response:
            assert response.status == 400
            assert check_shape(await response.json())["message"].startswith(told)


async def test_other_methods(stack: Stack) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        async with stack.http.request(method, "/v1/embeddings") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            check_shape(await response.json())
    async with stack.http.head("/health/live") as response:
        assert response.status == 200


async def test_body_too_large(make_stack: MakeStack) -> None:
    stack = await make_stack(max_body_bytes=1000)
    status, body = await stack.embed("x" * 2000)
    assert status == 413
    assert check_shape(body)["code"] == "body_too_large"

    async def parts() -> Any:  # without a Content-Length
        for _ in range(20):
            yield b" " * 100

    async with stack.http.post(
        "/v1/embeddings", data=parts(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 413
        check_shape(await response.json())
    await good_still_right(stack)


@pytest.mark.parametrize("item", [b"[1],", b'"a",'])
async def test_more_values_than_can_be_decoded_in_time(stack: Stack, item: bytes) -> None:
    data = io.BytesIO(b'{"model": "tiny", "input": [' + item * 2_000_001)
    async with stack.http.post("/v1/embeddings", data=data, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 413
        assert check_shape(await response.json())["code"] == "too_many_values"
    await good_still_right(stack)


async def test_too_many_token_ids(make_stack: MakeStack) -> None:
    stack = await make_stack(max_request_tokens=100)
    status, body = await stack.embed([[1] * 30] * 4)
    assert (status, check_shape(body)["code"]) == (413, "too_many_tokens")
    status, body = await stack.embed([[1] * 1000] * 3, truncate=True)
    assert status == 200
    await good_still_right(stack)


async def test_a_long_query_counts_with_every_document(make_stack: MakeStack, tiny_dir: Path) -> None:
    stack = await make_stack({"scorer": (tiny_dir, facts(task="score", dimension=1))}, max_request_tokens=400)
    body = {"model": "scorer", "query": "red " * 100, "documents": ["a"] * 20}
    status, answer = await stack.post("/v1/rerank", body)
    assert (status, check_shape(answer)["param"]) == (413, "query")
    status, answer = await stack.post("/v1/rerank", body | {"documents": ["a"]})
    assert status == 200


async def test_too_many_tokens(make_stack: MakeStack) -> None:
    stack = await make_stack(max_request_tokens=100)
    status, body = await stack.embed(["red " * 20] * 5)
    assert (status, check_shape(body)["code"]) == (413, "too_many_tokens")
    status, body = await stack.embed(["x" * 500] * 5)
    assert (status, check_shape(body)["code"]) == (413, "too_many_tokens")
    status, body = await stack.embed(["red " * 2000] * 3, truncate=True)
    assert status == 200
    await good_still_right(stack)


async def test_tasks_a_model_does_not_do(make_stack: MakeStack, tiny_dir: Path) -> None:
    stack = await make_stack(
        {
            "scorer": (tiny_dir, facts(task="score", dimension=1)),
            "labels": (tiny_dir, facts(task="score", dimension=3)),
            "writer": (tiny_dir, facts(task="generate")),
        }
    )
    for path, body in [
        ("/v1/embeddings", embed(model="scorer")),
        ("/v1/embeddings", embed(model="writer")),
        ("/v1/rerank", RERANK | {"model": "labels"}),
        ("/v1/score", SCORE | {"model": "writer"}),
    ]:
        status, answer = await stack.post(path, body)
        assert (status, check_shape(answer)["param"]) == (400, "model")


async def test_a_fault_of_ours_is_a_500_without_details(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret text")

    monkeypatch.setattr("gateway.handlers.split", broken)
    status, body = await stack.embed("hello")
    assert (status, check_shape(body)["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)
    events = [fields for event, fields in stack.events if event == "request_failed"]
    assert len(events) == 1
    assert "secret" not in json.dumps(events)
    monkeypatch.undo()
    await good_still_right(stack)

"""Whole requests over HTTP: the right vectors, scores, counts and headers come back."""

import base64
import struct
from pathlib import Path

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer
from yarl import URL

from tests.gateway.conftest import MakeStack, Stack, tiny_tokenizer, until, write_model
from tests.gateway.fake_scheduler import DIMENSION, facts, vector


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


async def test_embeds_a_string(stack: Stack, tokenizer: Tokenizer) -> None:
    status, body = await stack.embed("hello world")
    ids = tokenizer.encode("hello world").ids
    assert status == 200
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert [item["index"] for item in body["data"]] == [0]
    np.testing.assert_allclose(body["data"][0]["embedding"], vector(ids), rtol=1e-6)


async def test_embeds_a_list_in_order(stack: Stack, tokenizer: Tokenizer) -> None:
    texts = ["hello", "what is a tulip?", " ", "red " * 20, "hello"]
    status, body = await stack.embed(texts)
    assert status == 200
    assert [item["index"] for item in body["data"]] == list(range(len(texts)))
    for text, item in zip(texts, body["data"], strict=True):
        np.testing.assert_allclose(item["embedding"], vector(tokenizer.encode(text).ids), rtol=1e-6)


@pytest.mark.parametrize(("given", "rows"), [([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])])
async def test_token_ids_are_taken_as_given(stack: Stack, given: list[object], rows: list[list[int]]) -> None:
    status, body = await stack.embed(given)
    assert status == 200
    assert stack.schedulers["tiny/0"].sequences == rows
    assert body["usage"]["prompt_tokens"] == sum(map(len, rows))
    for ids, item in zip(rows, body["data"], strict=True):
        np.testing.assert_allclose(item["embedding"], vector(ids), rtol=1e-6)


async def test_base64_is_little_endian_float32(stack: Stack, tokenizer: Tokenizer) -> None:
    _, body = await stack.embed(["hello", "world"], encoding_format="base64")
    for text, item in zip(["hello", "world"], body["data"], strict=True):
        values = struct.unpack(f"<{DIMENSION}f", base64.b64decode(item["embedding"]))
        assert values == tuple(vector(tokenizer.encode(text).ids).tolist())


@pytest.mark.parametrize(
    ("encoding", "dtype", "num_bytes"),
    [("base64_int8", "int8", DIMENSION), ("base64_binary", "binary", DIMENSION // 8)],
)
async def test_int8_and_binary(stack: Stack, encoding: str, dtype: str, num_bytes: int) -> None:
    status, body = await stack.embed(["hello", "world"], encoding_format=encoding)
    assert status == 200
    assert [len(base64.b64decode(item["embedding"])) for item in body["data"]] == [num_bytes] * 2
    assert stack.schedulers["tiny/0"].submits[0].spec.dtype == dtype


async def test_dimensions_user_and_nulls(stack: Stack) -> None:
    status, body = await stack.embed("hello", dimensions=4, user="me", encoding_format=None, truncate=None)
    assert status == 200
    assert len(body["data"][0]["embedding"]) == 4
    assert stack.schedulers["tiny/0"].submits[0].spec.dimensions == 4


async def test_large_requests_are_split_and_joined_in_order(make_stack: MakeStack, tokenizer: Tokenizer) -> None:
    stack = await make_stack(num_replicas=2, max_chunk_tokens=64)
    texts = [f"tulip {i} " + "red " * (i % 17) for i in range(100)]
    status, body = await stack.embed(texts)
    assert status == 200
    for text, item in zip(texts, body["data"], strict=True):
        np.testing.assert_allclose(item["embedding"], vector(tokenizer.encode(text).ids), rtol=1e-6)
    for scheduler in stack.schedulers.values():
        assert scheduler.submits
        assert all(sum(submit.lengths) <= 64 for submit in scheduler.submits)


async def test_prompts_are_put_before_the_text(make_stack: MakeStack, tmp_path: Path, tokenizer: Tokenizer) -> None:
    directory = write_model(tmp_path / "m")
    (directory / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "query ", "document": "the "}, "default_prompt_name": "document"}'
    )
    stack = await make_stack({"tiny": (directory, None)})
    scheduler = stack.schedulers["tiny/0"]
    assert (await stack.embed("tulip", prompt_name="query"))[0] == 200
    assert (await stack.embed("tulip"))[0] == 200
    assert scheduler.sequences == [tokenizer.encode("query tulip").ids, tokenizer.encode("the tulip").ids]
    status, body = await stack.embed("tulip", prompt_name="nope")
    assert (status, body["error"]["param"]) == (400, "prompt_name")
    assert "document, query" in body["error"]["message"]
    assert (await stack.embed([5, 6], prompt_name="query"))[0] == 400


async def test_rerank_with_an_embedding_model_is_cosine_and_says_so(stack: Stack, tokenizer: Tokenizer) -> None:
    documents = ["hello", {"text": "world"}, "a red tulip"]
    request = {"model": "tiny", "query": "what is a tulip", "documents": documents, "return_documents": True}
    status, body = await stack.post("/v1/rerank", request)
    assert status == 200
    assert body["method"] == "cosine_similarity"
    query = vector(tokenizer.encode("what is a tulip").ids)
    texts = ["hello", "world", "a red tulip"]
    expected = [float(query @ vector(tokenizer.encode(text).ids)) for text in texts]
    assert [r["index"] for r in body["results"]] == sorted(range(3), key=lambda i: -expected[i])
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-6)
        assert result["document"] == {"text": texts[result["index"]]}


async def test_rerank_is_at_the_paths_that_other_servers_have_it_at(stack: Stack) -> None:
    request = {"model": "tiny", "query": "what is a tulip", "documents": ["hello", "a red tulip"]}
    expected = await stack.post("/v1/rerank", request)
    assert expected[0] == 200
    for path in ("/v2/rerank", "/rerank"):
        assert await stack.post(path, request) == expected


async def test_rerank_top_n(stack: Stack) -> None:
    request = {"model": "tiny", "query": "tulip", "documents": ["a", "b", "c"], "top_n": 2}
    _, body = await stack.post("/v1/rerank", request)
    assert len(body["results"]) == 2
    assert "document" not in body["results"][0]
    _, body = await stack.post("/v1/rerank", request | {"top_n": 10})
    assert len(body["results"]) == 3


SCORER = facts(task="score", dimension=1, architecture="BertForSequenceClassification")


async def test_cross_encoder_pairs(make_stack: MakeStack, tiny_dir: Path, tokenizer: Tokenizer) -> None:
    stack = await make_stack({"tiny": (tiny_dir, SCORER)})
    scheduler = stack.schedulers["tiny/0"]
    status, body = await stack.post("/v1/score", {"model": "tiny", "text_1": "hello", "text_2": ["red", "a tulip"]})
    assert status == 200
    assert body["method"] == "cross_encoder"
    pairs = [tokenizer.encode("hello", "red"), tokenizer.encode("hello", "a tulip")]
    assert scheduler.sequences == [pair.ids for pair in pairs]
    assert scheduler.type_starts == [pair.type_ids.index(1) for pair in pairs]
    assert [item["score"] for item in body["data"]] == [float(vector(pair.ids, 1)[0]) for pair in pairs]
    assert body["usage"]["prompt_tokens"] == sum(len(pair.ids) for pair in pairs)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("a", "b", [("a", "b")]),
        (["a", "b"], "c", [("a", "c"), ("b", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ],
)
async def test_score_sides(
    make_stack: MakeStack,
    tiny_dir: Path,
    tokenizer: Tokenizer,
    first: object,
    second: object,
    expected: list[tuple[str, str]],
) -> None:
    stack = await make_stack({"tiny": (tiny_dir, SCORER)})
    status, _ = await stack.post("/v1/score", {"model": "tiny", "text_1": first, "text_2": second})
    assert status == 200
    assert stack.schedulers["tiny/0"].sequences == [tokenizer.encode(a, b).ids for a, b in expected]


async def test_pairs_as_texts_and_as_joined_ids(make_stack: MakeStack, tiny_dir: Path, tokenizer: Tokenizer) -> None:
    stack = await make_stack({"tiny": (tiny_dir, SCORER)})
    scheduler = stack.schedulers["tiny/0"]
    pair = tokenizer.encode("hello", "red")
    await stack.post("/v1/rerank", {"model": "tiny", "pairs": [["hello", "red"]]})
    await stack.post("/v1/rerank", {"model": "tiny", "pairs": [pair.ids]})
    await stack.post("/v1/score", {"model": "tiny", "pairs": [pair.ids], "type_starts": [2]})
    bare = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("hello", "red")]
    await stack.post("/v1/rerank", {"model": "tiny", "query": bare[0], "documents": [bare[1]]})
    assert scheduler.sequences == [pair.ids] * 4
    start = pair.type_ids.index(1)
    assert scheduler.type_starts == [start, start, 2, start]


async def test_rerank_cuts_the_longer_side_and_keeps_the_frame(
    make_stack: MakeStack, tiny_dir: Path, tokenizer: Tokenizer
) -> None:
    stack = await make_stack({"tiny": (tiny_dir, SCORER)})
    document = "a tulip is red . " * 50
    status, _ = await stack.post("/v1/rerank", {"model": "tiny", "query": "hello", "documents": [document]})
    assert status == 200
    reference = tiny_tokenizer()
    reference.no_padding()
    reference.enable_truncation(32)
    assert stack.schedulers["tiny/0"].sequences == [reference.encode("hello", document).ids]
    request = {"model": "tiny", "query": "hello", "documents": ["a", document], "truncate": False}
    status, body = await stack.post("/v1/rerank", request)
    assert (status, body["error"]["param"]) == (400, "documents[1]")


async def test_headers(stack: Stack) -> None:
    request = {"model": "tiny", "input": "hello"}
    async with stack.http.post("/v1/embeddings", json=request, headers={"X-Request-Id": "abc-1"}) as response:
        assert response.headers["X-Request-Id"] == "abc-1"
        assert response.headers["Content-Type"] == "application/json"
        for name in ("X-Tokenize-Ms", "X-Queue-Ms", "X-Compute-Ms"):
            assert float(response.headers[name]) >= 0
    async with stack.http.post("/v1/embeddings", json=request, headers={"X-Request-Id": "x" * 1000}) as response:
        assert response.headers["X-Request-Id"] == "x" * 128


async def test_priority_travels(stack: Stack) -> None:
    await stack.post("/v1/embeddings", {"model": "tiny", "input": "a"}, X_Priority="bulk")
    await stack.embed("a")
    assert [submit.priority for submit in stack.schedulers["tiny/0"].submits] == ["bulk", "interactive"]


async def test_models(stack: Stack) -> None:
    async with stack.http.get("/v1/models") as response:
        body = await response.json()
    assert [(item["id"], item["object"]) for item in body["data"]] == [("tiny", "model")]
    assert body["data"][0]["max_model_len"] == 32


async def test_one_model_by_a_name_with_slashes(make_stack: MakeStack, tiny_dir: Path) -> None:
    stack = await make_stack({"org/tiny": (tiny_dir, None), "tiny": (tiny_dir, None)}, num_replicas=0)
    for spelled in ("org/tiny", "org%2Ftiny"):
        async with stack.http.get(URL(f"/v1/models/{spelled}", encoded=True)) as response:
            body = await response.json()
        assert (body["id"], body["object"], body["max_model_len"]) == ("org/tiny", "model", 32)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="any") as client:
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("org")
    assert raised.value.code == "model_not_found"
    status, _ = await stack.post("/v1/models/tiny", {})
    assert status == 405
    async with stack.http.get("/v1/models/") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_route")
    async with stack.http.get("/metrics") as response:
        assert 'route="/v1/models/{name}"' in await response.text()


async def test_metrics_show_every_process(stack: Stack) -> None:
    from ipc.control import ProcessStats

    other = ProcessStats("tiny/0/rank-0", 7, {"bouquet_steps_total": 3.0, 'bouquet_x{kind="a"}': 1.5})
    stack.schedulers["tiny/0"].stats["other"] = other
    stack.schedulers["tiny/0"].tell_status()
    await stack.embed("hello")
    await stack.embed([])
    samples = {}
    for _ in range(100):
        async with stack.http.get("/metrics") as response:
            text = await response.text()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = {(s.name, *sorted(s.labels.items())): s.value for family in families.values() for s in family.samples}
        if "bouquet_steps" in families:
            break
    labels = (("process", "gateway/0"), ("route", "/v1/embeddings"))
    assert samples["bouquet_http_requests_total", *labels, ("status", "200")] == 1
    assert samples["bouquet_http_requests_total", *labels, ("status", "400")] == 1
    assert samples["bouquet_steps_total", ("process", "tiny/0/rank-0")] == 3
    assert samples["bouquet_x", ("kind", "a"), ("process", "tiny/0/rank-0")] == 1.5
    assert families["bouquet_http_request_seconds"].type == "histogram"
    assert families["bouquet_http_requests"].type == "counter"


async def test_own_figures_go_to_the_scheduler(stack: Stack) -> None:
    await stack.embed("hello")
    scheduler = stack.schedulers["tiny/0"]
    await until(lambda: "gateway/0" in scheduler.stats)
    assert "bouquet_prompt_tokens_total" in scheduler.stats["gateway/0"].values


async def test_the_openai_sdk_works_unmodified(stack: Stack, tokenizer: Tokenizer) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="any") as client:
        answer = await client.embeddings.create(model="tiny", input=["hello", "world"])  # base64 by default
        for text, item in zip(["hello", "world"], answer.data, strict=True):
            np.testing.assert_allclose(item.embedding, vector(tokenizer.encode(text).ids), rtol=1e-6)
        assert answer.usage.prompt_tokens == 6
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="nope", input="a")
        with pytest.raises(openai.BadRequestError) as raised:
            await client.embeddings.create(model="tiny", input=[""])
        assert raised.value.param == "input[0]"

"""The demo's data, its ranking, and the whole of it against a small server."""

import asyncio
import base64
import hashlib
from argparse import Namespace

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import demo
from bench.demo import DemoError, check_vectors, load_passages, load_queries, nearest

MODEL = "all-minilm-l6-v2"


def test_corpus_is_whole_and_every_query_has_its_passage() -> None:
    passages, queries = load_passages(), load_queries()
    ids = {passage["id"] for passage in passages}
    assert (len(passages), len(ids), len(queries)) == (1000, 1000, 10)
    assert all(50 <= len(passage["text"].split()) <= 160 for passage in passages)
    assert {query["expected"] for query in queries} <= ids


def test_nearest_is_by_falling_similarity_and_ties_keep_their_order() -> None:
    vectors = np.array([[0, 1], [1, 0], [0.6, 0.8], [1, 0]], np.float32)
    assert nearest(vectors, np.array([1, 0], np.float32), 3) == [1, 3, 2]
    assert nearest(vectors, np.array([0, 1], np.float32), 10) == [0, 2, 1, 3]


def test_vectors_are_checked() -> None:
    good = np.eye(4, dtype=np.float32)
    check_vectors(good, 4)
    with pytest.raises(DemoError, match="5 passages were sent, 4"):
        check_vectors(good, 5)
    with pytest.raises(DemoError, match="not normalised"):
        check_vectors(good * 1.1, 4)
    with pytest.raises(DemoError, match="not normalised"):
        check_vectors(good * np.nan, 4)


def vector_of(text: str) -> np.ndarray:
    """A bag of words, hashed: enough to find a passage by its own words."""
    vector = np.zeros(512, np.float32)
    for word in text.lower().split():
        vector[int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % 512] += 1
    return vector / np.linalg.norm(vector)


def make_app(chat_pieces: tuple[str, ...] | None = None) -> web.Application:
    """With a chat model that says `chat_pieces`, if there are any."""
    served = ["other", MODEL, *([demo.DEFAULT_CHAT_MODEL] if chat_pieces is not None else [])]
    chat_pieces = chat_pieces or ()

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in served]})

    async def embeddings(request: web.Request) -> web.Response:
        body = await request.json()
        rows = [
            {"index": index, "embedding": base64.b64encode(vector_of(text).tobytes()).decode()}
            for index, text in enumerate(body["input"])
        ]
        return web.json_response({"data": rows[::-1]})  # the index counts, not the order

    async def rerank(request: web.Request) -> web.Response:
        body = await request.json()
        scores = [float(vector_of(text) @ vector_of(body["query"])) for text in body["documents"]]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body["top_n"]]
        return web.json_response({"results": [{"index": i, "relevance_score": scores[i]} for i in order]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["model"] == demo.DEFAULT_CHAT_MODEL
        assert load_passages()[5]["text"] in body["messages"][0]["content"]  # the one that was found
        response = web.StreamResponse()
        await response.prepare(request)
        for text in chat_pieces:
            await response.write(f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'.encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/health/ready", ready)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_post("/v1/rerank", rerank)
    return app


async def run_demo(app: web.Application, **changes: object) -> int:
    async with TestServer(app) as server:
        settings = {"model": None, "rerank_model": None, "batch": 64, "concurrency": 4, "timeout": 20.0}
        return await demo.demo(Namespace(url=str(server.make_url("/")), **(settings | changes)))


def use_queries(monkeypatch: pytest.MonkeyPatch, expected_of: int) -> None:
    """Two queries made of passages' own words; the second expects passage `expected_of`."""
    passages = load_passages()
    made = [
        {"query": passages[5]["text"][:300], "expected": passages[5]["id"]},
        {"query": passages[9]["text"][:300], "expected": passages[expected_of]["id"]},
    ]
    monkeypatch.setattr(demo, "load_queries", lambda: made)


def test_demo_succeeds_when_every_passage_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_queries(monkeypatch, expected_of=9)
    assert asyncio.run(run_demo(make_app())) == 0
    output = capsys.readouterr().out
    assert "expected passage in the top 3: 2 of 2" in output
    assert "passages/s" in output
    assert "reranked by cosine" in output
    assert f"1000 passages with {MODEL} (dimension 512, normalised)" in output


def test_the_chat_model_answers_as_it_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_queries(monkeypatch, expected_of=9)
    assert asyncio.run(run_demo(make_app(("Mala", "yalam", ".")))) == 0
    output = capsys.readouterr().out
    assert "  Malayalam.\n  first token after" in output
    with pytest.raises(DemoError, match="answered nothing"):
        asyncio.run(run_demo(make_app(())))


def test_demo_fails_when_a_passage_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_queries(monkeypatch, expected_of=700)
    assert asyncio.run(run_demo(make_app())) == 1
    assert "MISSED" in capsys.readouterr().out


def test_a_model_that_is_not_served_is_named() -> None:
    with pytest.raises(DemoError, match="'nothing' is not served; served: other, all-minilm-l6-v2"):
        asyncio.run(run_demo(make_app(), model="nothing"))


def test_no_stack_is_said_with_the_remedy() -> None:
    settings = Namespace(url="http://127.0.0.1:9", model=None, rerank_model=None, batch=64, concurrency=4, timeout=5.0)
    with pytest.raises(DemoError, match="start one with: make serve"):
        asyncio.run(demo.demo(settings))

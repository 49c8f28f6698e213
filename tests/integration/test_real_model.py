"""The real default model through the whole stack, against sentence-transformers; real clients."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from tests.integration.stack import Stack

MODEL = "all-minilm-l6-v2"
RANK, SCHEDULER = f"{MODEL}-0:rank-0", f"{MODEL}-0:scheduler"
TEXTS = [
    "tulips from Amsterdam",
    "a",
    "   ",
    "Wie hoch ist der Eiffelturm? Il est haut de 330 mètres. 東京タワーより低い。",
    "🌷🌹🌿 emoji and naïve café — “quotes”",
    "The text [CLS] spells a [SEP] special [PAD] token [MASK].",
    "line\nbreaks\tand\x00control characters",
    "long " * 200,
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, minilm_dir: Path) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("bq"), {MODEL: minilm_dir}) as made:
        yield made


@pytest.fixture(scope="module")
def reference(minilm_dir: Path) -> SentenceTransformer:
    return SentenceTransformer(str(minilm_dir), device="cpu")


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def plain(reference: SentenceTransformer, texts: list[str]) -> NDArray[np.float32]:
    """Reference vectors with special tokens spelled in a text taken as plain text."""
    return np.asarray(reference.encode(texts, convert_to_numpy=True))


def cosine(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float32]:
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return np.asarray((ours * theirs).sum(1) / norms)


def test_openai_sdk_gives_the_references_vectors(client: openai.OpenAI, reference: SentenceTransformer) -> None:
    texts = [text for text in TEXTS if "[CLS]" not in text]
    answer = client.embeddings.create(model=MODEL, input=texts)
    ours = np.array([item.embedding for item in answer.data], np.float32)
    assert (cosine(ours, plain(reference, texts)) >= 0.99999).all()
    counts = [len(reference.tokenizer(text)["input_ids"]) for text in texts]
    assert answer.usage.prompt_tokens == sum(counts)


def test_alone_and_in_company_are_the_same(client: openai.OpenAI) -> None:
    together = client.embeddings.create(model=MODEL, input=TEXTS)
    for text, item in zip(TEXTS, together.data, strict=True):
        alone = client.embeddings.create(model=MODEL, input=text, encoding_format="float").data[0].embedding
        ours = np.array([item.embedding], np.float32)
        assert cosine(ours, np.array([alone], np.float32)) >= 0.99999


def test_an_overlong_text_is_refused_unless_truncation_is_asked_for(
    client: openai.OpenAI, reference: SentenceTransformer
) -> None:
    text = "overlong text about many flowers in a garden " * 100
    with pytest.raises(openai.BadRequestError, match="input"):
        client.embeddings.create(model=MODEL, input=["fine", text])
    answer = client.embeddings.create(model=MODEL, input=["fine", text], extra_body={"truncate": True})
    ours = np.array([item.embedding for item in answer.data], np.float32)
    assert (cosine(ours, plain(reference, ["fine", text])) >= 0.99999).all()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


async def test_rerank_by_cosine(stack: Stack, reference: SentenceTransformer) -> None:
    query, documents = "spring flowers", ["diesel engines", "tulips and daffodils", "tax law"]
    body = {"model": MODEL, "query": query, "documents": documents, "top_n": 2, "return_documents": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/rerank", json=body) as response,
    ):
        assert response.status == 200
        answer = await response.json()
    vectors = plain(reference, [query, *documents])
    expected = cosine(vectors[1:], vectors[:1])
    assert [result["index"] for result in answer["results"]] == list(np.argsort(-expected)[:2])
    np.testing.assert_allclose([r["relevance_score"] for r in answer["results"]], np.sort(expected)[:0:-1], atol=1e-4)
    assert "cosine" in str(answer)


BAD = [
    ("/v1/embeddings", b"{", 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": []}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": ["ok", ""]}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": ["ok", 3]}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": [1, NaN]}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": [[5, 999999999]]}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": [[5, -1]]}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": "x", "dimensions": 0}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": "x", "dimensions": 385}', 400),
    ("/v1/embeddings", b'{"model": "all-minilm-l6-v2", "input": "x", "encoding_format": "hex"}', 400),
    ("/v1/embeddings", b'{"model": "nobody", "input": "x"}', 404),
    ("/v1/embeddings", b"[" * 100_000, 400),
    ("/v1/rerank", b'{"model": "all-minilm-l6-v2", "query": "q", "documents": []}', 400),
    ("/v1/rerank", b'{"model": "all-minilm-l6-v2", "query": "q", "documents": ["d"], "top_n": 0}', 400),
    ("/v1/nowhere", b"{}", 404),
]


@pytest.mark.parametrize(("path", "body", "status"), BAD)
async def test_bad_input_is_said_and_harms_nobody(stack: Stack, path: str, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{stack.url}{path}", data=body, headers=headers) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert error["message"]
            assert {"message", "type", "param", "code"} <= set(error)
        good = {"model": MODEL, "input": "tulips from Amsterdam"}
        async with session.post(f"{stack.url}/v1/embeddings", json=good) as response:
            vector = (await response.json())["data"][0]["embedding"]
    assert abs(np.linalg.norm(vector) - 1) < 1e-3


async def test_metrics_count_what_was_done(stack: Stack) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.url}/metrics") as response:
        text = await response.text()
    assert response.headers["Content-Type"].startswith("text/plain")
    for process in ("gateway", "scheduler"):
        assert process in text


@pytest.mark.parametrize("victim", [RANK, SCHEDULER])
async def test_kill_under_load_with_the_real_model(stack: Stack, reference: SentenceTransformer, victim: str) -> None:
    """In-flight work is answered rightly, and the stack serves again within 10 s."""
    text = ["roses are red", "violets are blue and smell of spring"]
    expected = plain(reference, text)
    stop = asyncio.Event()
    wrong, failed, right = [], [], []

    async def ask(session: aiohttp.ClientSession) -> None:
        while not stop.is_set():
            body = {"model": MODEL, "input": text}
            async with session.post(f"{stack.url}/v1/embeddings", json=body) as response:
                if response.status != 200:
                    failed.append(await response.text())
                    continue
                data = (await response.json())["data"]
            ours = np.array([item["embedding"] for item in data], np.float32)
            (right if (cosine(ours, expected) >= 0.99999).all() else wrong).append(1)

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(ask(session)) for _ in range(4)]
        await asyncio.sleep(0.5)
        killed = time.monotonic()
        stack.kill(victim)
        before = len(right)
        while len(right) < before + 20:
            await asyncio.sleep(0.05)
            assert time.monotonic() - killed < 20
        back = time.monotonic() - killed
        stop.set()
        await asyncio.gather(*tasks)
    assert not wrong
    assert not failed
    assert back < 10

"""`make demo`: a client of a running stack. Embeds 1,000 passages, answers ten questions by nearest vector, reranks,
and lets a language model put one answer into words.

It knows the HTTP interface and nothing of the processes behind it. Exits with 1 when an expected passage is missed.
"""

import argparse
import asyncio
import base64
import gzip
import json
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

DATA = Path(__file__).parent / "demo_data"
DEFAULT_MODEL = "all-minilm-l6-v2"
DEFAULT_CHAT_MODEL = "smollm2-135m-instruct"
MAX_ANSWER_TOKENS = 48
NUM_CANDIDATES = 10  # nearest passages given to the reranker
NUM_SHOWN = 3
NUM_LATENCY_ROUNDS = 3  # each query is timed this often


class DemoError(RuntimeError):
    """Something the user can put right; the text says how."""


class Stack:
    """The few calls the demo makes, over one keep-alive connection pool."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(self, method: str, path: str, body: object = None) -> Any:
        """The answer's JSON. Raises DemoError for a refused connection and for any error answer."""
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                text = await response.text()
        except aiohttp.ClientConnectorError as error:
            raise DemoError(f"no stack answers at {self._url}: start one with: make serve") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoError(f"{method} {path} was not answered: {error!r}") from error
        if response.status == 200:
            return json.loads(text) if text.startswith(("{", "[")) else text
        raise DemoError(f"{method} {path} answered {response.status}: {_error_message(text)}")

    async def embed(self, model: str, texts: list[str]) -> np.ndarray:
        """Vectors of `texts`, float32 [len(texts), dimension]."""
        body = {"model": model, "input": texts, "encoding_format": "base64", "truncate": True}
        answer = await self.call("POST", "/v1/embeddings", body)
        rows = sorted(answer["data"], key=lambda row: row["index"])
        return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows])

    async def rerank(self, model: str, query: str, documents: list[str]) -> list[tuple[int, float]]:
        """(index into `documents`, score), best first."""
        body = {"model": model, "query": query, "documents": documents, "top_n": NUM_SHOWN}
        answer = await self.call("POST", "/v1/rerank", body)
        return [(row["index"], row["relevance_score"]) for row in answer["results"]]

    async def chat(self, model: str, prompt: str) -> AsyncIterator[str]:
        """The answer's text, piece by piece as it comes."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True}
        body |= {"max_tokens": MAX_ANSWER_TOKENS, "temperature": 0}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise DemoError(f"chat answered {response.status}: {_error_message(await response.text())}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise DemoError(f"chat broke off: {event['error']['message']}")
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def load_passages() -> list[dict[str, str]]:
    with gzip.open(DATA / "passages.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def load_queries() -> list[dict[str, str]]:
    queries: list[dict[str, str]] = json.loads((DATA / "queries.json").read_text(encoding="utf-8"))
    return queries


def nearest(vectors: np.ndarray, query: np.ndarray, count: int) -> list[int]:
    """Rows of `vectors` [n, d] by falling dot product with `query` [d]; ties go to the earlier row."""
    return [int(i) for i in np.argsort(-(vectors @ query), kind="stable")[:count]]


def check_vectors(vectors: np.ndarray, num_expected: int) -> None:
    """Raises DemoError unless there is one finite unit vector for each text."""
    if len(vectors) != num_expected:
        raise DemoError(f"{num_expected} passages were sent, {len(vectors)} vectors came back")
    norms = np.linalg.norm(vectors, axis=1)
    if not np.isfinite(norms).all() or np.abs(norms - 1).max() > 1e-3:
        raise DemoError(f"vectors are not normalised: norms from {norms.min():.4f} to {norms.max():.4f}, 1 expected")


async def put_into_words(
    stack: Stack, model: str, rerank_model: str, vectors: np.ndarray, passages: list[dict[str, str]]
) -> None:
    """Prints the chat model's answer to the first question, from the passage that was found for it, as it comes."""
    query = load_queries()[0]["query"]
    candidates = nearest(vectors, (await stack.embed(model, [query]))[0], NUM_CANDIDATES)
    ranked = await stack.rerank(rerank_model, query, [passages[i]["text"] for i in candidates])
    passage = passages[candidates[ranked[0][0]]]["text"]
    prompt = f"{passage}\n\nAnswer in one short sentence, from the text above: {query}"
    print(f"\n{DEFAULT_CHAT_MODEL} reads the passage and is asked: {query}\n  ", end="", flush=True)
    began, times, text = time.perf_counter(), [], ""
    async for piece in stack.chat(DEFAULT_CHAT_MODEL, prompt):
        if piece:
            times.append(time.perf_counter())
            text += piece
            print(piece.replace("\n", " "), end="", flush=True)
    if not text.strip():
        raise DemoError(f"{DEFAULT_CHAT_MODEL} answered nothing")
    first_ms = (times[0] - began) * 1000
    pace = f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s" if len(times) > 1 else ""
    print(f"\n  first token after {first_ms:.0f} ms{pace}")


async def served_models(stack: Stack) -> list[str]:
    return [row["id"] for row in (await stack.call("GET", "/v1/models"))["data"]]


async def choose_model(stack: Stack, wanted: str | None) -> str:
    """The model to ask: the one named, or the default one where it is served, or the first."""
    served = await served_models(stack)
    if wanted is None and served:
        return DEFAULT_MODEL if DEFAULT_MODEL in served else served[0]
    if wanted is not None and wanted in served:
        return wanted
    raise DemoError(f"model {wanted!r} is not served; served: {', '.join(served) or 'none'}")


async def embed_passages(
    stack: Stack, model: str, texts: list[str], batch: int, concurrency: int
) -> tuple[np.ndarray, float]:
    """Vectors of all texts in order, and the seconds it took, with `concurrency` requests in flight."""
    parts: dict[int, np.ndarray] = {}
    starts = iter(range(0, len(texts), batch))
    bar = tqdm(total=len(texts), unit=" passages", desc="embedding", smoothing=0)

    async def worker() -> None:
        for start in starts:  # shared: each start is taken once
            parts[start] = await stack.embed(model, texts[start : start + batch])
            bar.update(len(parts[start]))

    began = time.perf_counter()
    with bar:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    seconds = time.perf_counter() - began
    return np.concatenate([parts[start] for start in sorted(parts)]), seconds


async def answer_queries(
    stack: Stack, models: tuple[str, str], passages: list[dict[str, str]], vectors: np.ndarray
) -> tuple[int, list[float]]:
    """Prints the hits of every query. Returns how many missed their passage, and each query's embedding time in ms."""
    misses, times_ms = 0, []
    for number, entry in enumerate(load_queries(), 1):
        for _ in range(NUM_LATENCY_ROUNDS):
            began = time.perf_counter()
            query_vector = (await stack.embed(models[0], [entry["query"]]))[0]
            times_ms.append((time.perf_counter() - began) * 1000)
        candidates = nearest(vectors, query_vector, NUM_CANDIDATES)
        ranked = await stack.rerank(models[1], entry["query"], [passages[i]["text"] for i in candidates])
        hits = [(passages[candidates[index]], score) for index, score in ranked]
        found = any(passage["id"] == entry["expected"] for passage, _ in hits)
        misses += not found
        print(f"\n{number:2}. {entry['query']}" + ("" if found else f"   MISSED {entry['expected']}"))
        for passage, score in hits:
            mark = "*" if passage["id"] == entry["expected"] else " "
            print(f"  {mark} {score:6.3f}  {passage['id']}  {textwrap.shorten(passage['text'], 88, placeholder=' …')}")
    return misses, times_ms


async def demo(args: argparse.Namespace) -> int:
    """The whole demo; the exit code."""
    timeout = aiohttp.ClientTimeout(total=args.timeout)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        stack = Stack(session, args.url.rstrip("/"))
        await stack.call("GET", "/health/ready")
        model = await choose_model(stack, args.model)
        rerank_model = await choose_model(stack, args.rerank_model or model)
        passages = load_passages()
        texts = [passage["text"] for passage in passages]
        vectors, seconds = await embed_passages(stack, model, texts, args.batch, args.concurrency)
        check_vectors(vectors, len(texts))
        method = "by cosine" if rerank_model == model else f"by {rerank_model}"
        print(f"\nthe {NUM_CANDIDATES} nearest of each query, reranked {method}; score, passage; * is the expected one")
        misses, times_ms = await answer_queries(stack, (model, rerank_model), passages, vectors)
        if DEFAULT_CHAT_MODEL in await served_models(stack):
            await put_into_words(stack, model, rerank_model, vectors, passages)
    print(
        f"\n{len(texts)} passages with {model} (dimension {vectors.shape[1]}, normalised) in {seconds:.1f} s: "
        f"{len(texts) / seconds:.1f} passages/s"
        f"\nquery embedding p50 {np.median(times_ms):.1f} ms (over HTTP, {len(times_ms)} samples)"
        f"\nexpected passage in the top {NUM_SHOWN}: {len(load_queries()) - misses} of {len(load_queries())}"
    )
    return 1 if misses else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--url", help="default: http://127.0.0.1:PORT")
    parser.add_argument("--model", help=f"default: {DEFAULT_MODEL} where served, else the first")
    parser.add_argument("--rerank-model", help="default: the embedding model (cosine similarity)")
    parser.add_argument("--batch", type=int, default=32, help="passages a request")
    parser.add_argument("--concurrency", type=int, default=4, help="requests in flight")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a request may take")
    args = parser.parse_args()
    args.url = args.url or f"http://127.0.0.1:{args.port}"
    try:
        sys.exit(asyncio.run(demo(args)))
    except* DemoError as group:
        sys.exit(f"demo: {_first(group)}")
    except* KeyboardInterrupt:
        sys.exit("demo: stopped")


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()

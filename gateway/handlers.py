"""From a request to its answer, one path per task: parse, admit, encode, split, dispatch, gather, render."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from aiohttp import web

from gateway.answer import Answer
from gateway.call import INLINE_CHARS, QUICK_INLINE_CHARS, Call
from gateway.deadline import Deadline
from gateway.dialects.registry import Dialect
from gateway.encode import encode_embed, encode_score, token_limit
from gateway.errors import GatewayError, InvalidRequest
from gateway.front import Handler
from gateway.generate import generate
from gateway.limits import check_chars, check_items, check_tokens, priority, read_body, timeout_ms
from gateway.models import ServedModel
from gateway.split import split
from gateway.state import Gateway
from gateway.tasks import (
    EmbedOutcome,
    EmbedTask,
    Encoded,
    GenerateTask,
    Outcome,
    Rows,
    ScoreOutcome,
    ScoreTask,
    Text,
    place,
)
from ipc.types import ModelFacts, OutputSpec

T = TypeVar("T", EmbedTask, ScoreTask)


def task_handler(dialect: Dialect) -> Handler:
    """The handler of a dialect's route."""

    async def handle(gateway: Gateway, request: web.BaseRequest) -> web.StreamResponse:
        config = gateway.config
        usual_ms = config.timeout_ms if dialect.events is None else config.generation_timeout_ms
        with gateway.admission, Deadline(timeout_ms(request, usual_ms)) as deadline:
            return await _answer(request, dialect, gateway, deadline.at)

    return handle


async def _answer(request: web.BaseRequest, dialect: Dialect, gateway: Gateway, deadline: float) -> web.StreamResponse:
    urgency = priority(request)
    task = dialect.parse(await read_body(request, gateway.config))
    model = gateway.model(task.model)
    with gateway.admission_of[model.name]:
        call = Call(gateway, model, gateway.client.facts(model.name), urgency, deadline)
        outcome: Outcome
        match task:
            case EmbedTask():
                outcome = await embed(call, task)
            case ScoreTask():
                outcome = await score(call, task)
            case GenerateTask():
                return await generate(request, call, task, dialect)
        return Answer(dialect.render(task, outcome), call.headers())


async def embed(call: Call, task: EmbedTask) -> EmbedOutcome:
    """Vectors of a task's inputs, in order."""
    check_items("input", len(task.inputs), call.gateway.config)
    _check_embedding(call, task)
    encoded = await _encode(call, encode_embed, task, [("input", task.inputs)])
    num_tokens = encoded.num_tokens
    rows = await _dispatch(call, encoded, num_tokens, task.spec, lambda index: place("input", index))
    return EmbedOutcome(rows, num_tokens)


async def score(call: Call, task: ScoreTask) -> ScoreOutcome:
    """Scores of a task's pairs, in order. An embedding model's is the cosine of its two vectors."""
    query_field, document_field, joined_field = task.fields
    for field, items in ((query_field, task.queries), (document_field, task.documents), (joined_field, task.joined)):
        check_items(field, len(items), call.gateway.config)
    _check_scoring(call)
    # a cross-encoder reads the query anew with every document
    queries = task.queries if call.facts.task == "embed" else [task.queries[q] for q, _ in task.pairs]
    inputs: list[tuple[str, list[Text]]] = [(query_field, queries), (document_field, task.documents)]
    if task.instruction is not None:
        inputs.append(("instruction", [task.instruction] * len(task.pairs)))
    encoded = await _encode(call, encode_score, task, inputs)

    def culprit(index: int) -> str:
        if task.joined:
            return place(joined_field, index)
        if call.facts.task == "score":
            return place(document_field, task.pairs[index][1])
        num_queries = len(task.queries)
        return place(query_field, index) if index < num_queries else place(document_field, index - num_queries)

    num_tokens = encoded.num_tokens
    rows = await _dispatch(call, encoded, num_tokens, OutputSpec(), culprit)
    if call.facts.task == "embed":
        return ScoreOutcome(_cosines(rows, task), num_tokens, "cosine_similarity")
    return ScoreOutcome(rows.matrix("<f4")[:, 0].tolist(), num_tokens, "cross_encoder")


def _check_embedding(call: Call, task: EmbedTask) -> None:
    if call.facts.task != "embed":
        text = f"model {call.model.name!r} gives no embeddings; it is one for {call.facts.task}"
        raise InvalidRequest(text, param="model")
    dimensions = task.spec.dimensions
    if dimensions is not None and dimensions > call.facts.dimension:
        text = f"dimensions is {dimensions}; the model's vectors have {call.facts.dimension}"
        raise InvalidRequest(text, param="dimensions")


def _check_scoring(call: Call) -> None:
    if call.facts.task == "generate":
        raise InvalidRequest(f"model {call.model.name!r} generates text; it does not score", param="model")
    if call.facts.task == "score" and call.facts.dimension != 1:
        text = (
            f"{call.model.name!r} gives {call.facts.dimension} values for a pair; scoring needs a model that gives one"
        )
        raise InvalidRequest(text, param="model")


async def _encode(
    call: Call,
    encode: Callable[[T, ServedModel, ModelFacts], Encoded],
    task: T,
    inputs: list[tuple[str, list[Text]]],
) -> Encoded:
    """Token ids, computed on the pool unless there is little to do."""
    config, limit = call.gateway.config, token_limit(call.model, call.facts)
    start = time.perf_counter()
    num_chars = 0
    for field, texts in inputs:
        num_chars += check_chars(field, texts, limit, task.truncate, config)
    if num_chars <= INLINE_CHARS or (num_chars <= QUICK_INLINE_CHARS and _is_quick(call.model, inputs)):
        encoded = encode(task, call.model, call.facts)
    else:
        loop = asyncio.get_running_loop()
        encoded = await loop.run_in_executor(call.gateway.pool, encode, task, call.model, call.facts)
    seconds = time.perf_counter() - start
    call.tokenize_ms = seconds * 1000
    call.gateway.metrics.tokenize_seconds.observe(seconds)
    return encoded


def _is_quick(model: ServedModel, inputs: list[tuple[str, list[Text]]]) -> bool:
    return all(model.tokenizer.is_quick(text) for _, texts in inputs for text in texts if isinstance(text, str))


async def _dispatch(
    call: Call, encoded: Encoded, num_tokens: int, spec: OutputSpec, culprit: Callable[[int], str]
) -> Rows:
    """Result rows, all of them; `culprit` names the field a sequence came from."""
    gateway, name = call.gateway, call.model.name
    check_tokens(num_tokens, gateway.config)
    gateway.metrics.prompt_tokens += num_tokens
    num_replicas = gateway.client.num_live(name) if len(encoded.sequences) > 1 else 1
    chunks = split(encoded, gateway.config.max_chunk_tokens, num_replicas)
    job = gateway.client.start(name, chunks, spec, call.priority, call.deadline)
    try:
        rows = await job.future
    except asyncio.CancelledError:
        late = asyncio.get_running_loop().time() >= call.deadline
        job.abort("deadline" if late else "disconnect")
        raise
    except GatewayError as error:
        if error.index is not None:
            error.param = culprit(error.index)
            error.message = f"{error.param}: {error.message}"
        raise
    call.timings = rows.timings
    return rows


def _cosines(rows: Rows, task: ScoreTask) -> list[float]:
    vectors = rows.matrix("<f4").astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(norms == 0, 1, norms)
    queries, documents = units[: len(task.queries)], units[len(task.queries) :]
    q, d = np.array(task.pairs).T
    cosines: list[float] = np.einsum("ij,ij->i", queries[q], documents[d]).tolist()
    return cosines

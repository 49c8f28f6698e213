"""Reranking in the shape of Cohere and Jina, /v1/score in vLLM's; both also take token ids and ready-made pairs."""

from typing import Annotated, Any

import msgspec
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.dialects.decode import decode
from gateway.dialects.fields import Texts, TokenId, read_texts, refuse_unsupported
from gateway.errors import InvalidRequest
from gateway.tasks import ScoreOutcome, ScoreTask, Text

UNSUPPORTED = ("rank_fields", "max_chunks_per_doc", "max_tokens_per_doc", "truncate_prompt_tokens")
Pairs = list[list[str | TokenId | list[TokenId]]]


class Document(Struct):
    text: str


class PairsBody(Struct):
    """What both routes take."""

    model: str
    pairs: Pairs | None = None
    type_starts: list[TokenId] | None = None
    truncate: bool | None = None
    instruction: str | None = None
    user: str | None = None
    rank_fields: Raw | UnsetType = UNSET
    max_chunks_per_doc: Raw | UnsetType = UNSET
    max_tokens_per_doc: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET


class RerankBody(PairsBody):
    query: str | list[TokenId] | None = None
    documents: list[str | Document | list[TokenId]] | None = None
    top_n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None


class ScoreBody(PairsBody):
    text_1: Texts | None = None
    text_2: Texts | None = None


_rerank_decoder = msgspec.json.Decoder(RerankBody)
_score_decoder = msgspec.json.Decoder(ScoreBody)


def parse_rerank(body: bytes) -> ScoreTask:
    """Raises InvalidRequest."""
    fields = decode(_rerank_decoder, body)
    refuse_unsupported(fields, UNSUPPORTED)
    if fields.pairs is not None:
        _refuse_beside_pairs(query=fields.query, documents=fields.documents)
        return _pairs_task(fields, fields.pairs, fields.top_n, bool(fields.return_documents))
    _require(query=fields.query, documents=fields.documents)
    _refuse_type_starts(fields)
    query: Any = fields.query
    documents: Any = [d.text if isinstance(d, Document) else d for d in fields.documents or []]
    if not query:
        raise InvalidRequest("query is empty; give a text or token ids", param="query")
    read_texts("documents", documents)
    if fields.return_documents and not isinstance(documents[0], str):
        raise InvalidRequest("return_documents needs documents given as text", param="return_documents")
    return ScoreTask(
        model=fields.model,
        queries=[query],
        documents=documents,
        pairs=[(0, d) for d in range(len(documents))],
        truncate=fields.truncate is not False,
        instruction=fields.instruction,
        top_n=fields.top_n,
        return_documents=bool(fields.return_documents),
    )


def parse_score(body: bytes) -> ScoreTask:
    """Raises InvalidRequest."""
    fields = decode(_score_decoder, body)
    refuse_unsupported(fields, UNSUPPORTED)
    if fields.pairs is not None:
        _refuse_beside_pairs(text_1=fields.text_1, text_2=fields.text_2)
        return _pairs_task(fields, fields.pairs, None, False)
    _require(text_1=fields.text_1, text_2=fields.text_2)
    _refuse_type_starts(fields)
    first = read_texts("text_1", [] if fields.text_1 is None else fields.text_1)
    second = read_texts("text_2", [] if fields.text_2 is None else fields.text_2)
    if len(first) != len(second) and 1 not in (len(first), len(second)):
        text = f"text_1 has {len(first)} items and text_2 {len(second)}; give as many, or one on either side"
        raise InvalidRequest(text, param="text_2")
    num_pairs = max(len(first), len(second))
    return ScoreTask(
        model=fields.model,
        queries=first,
        documents=second,
        pairs=[(min(i, len(first) - 1), min(i, len(second) - 1)) for i in range(num_pairs)],
        truncate=fields.truncate is not False,
        instruction=fields.instruction,
        fields=("text_1", "text_2", "pairs"),
    )


def render_rerank(task: ScoreTask, outcome: ScoreOutcome) -> bytes:
    """Best first; equal scores in the order given."""
    scores = outcome.scores
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: task.top_n]
    results: list[dict[str, object]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if task.return_documents:
        for result, i in zip(results, order, strict=True):
            result["document"] = {"text": task.documents[task.pairs[i][1]]}
    return orjson.dumps(
        {"object": "list", "model": task.model, "method": outcome.method, "results": results, "usage": _usage(outcome)}
    )


def render_score(task: ScoreTask, outcome: ScoreOutcome) -> bytes:
    data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(outcome.scores)]
    return orjson.dumps(
        {"object": "list", "model": task.model, "method": outcome.method, "data": data, "usage": _usage(outcome)}
    )


def _usage(outcome: ScoreOutcome) -> dict[str, int]:
    return {"prompt_tokens": outcome.num_tokens, "total_tokens": outcome.num_tokens}


def _pairs_task(fields: PairsBody, pairs: Pairs, top_n: int | None, return_documents: bool) -> ScoreTask:
    """`pairs`: lists of token ids, ready to run; or lists of two texts (or of two texts' token ids)."""
    if not pairs:
        raise InvalidRequest("pairs is empty; give at least one pair", param="pairs")
    joined = type(pairs[0][0]) is int if pairs[0] else False
    queries: list[Text] = []
    documents: list[Text] = []
    for i, pair in enumerate(pairs):
        if joined:
            _check_joined(i, pair)
        else:
            query, document = _two_texts(i, pair)
            queries.append(query)
            documents.append(document)
    if return_documents and (joined or not isinstance(documents[0], str)):
        raise InvalidRequest("return_documents needs documents given as text", param="return_documents")
    ids: Any = pairs if joined else []
    return ScoreTask(
        model=fields.model,
        queries=queries,
        documents=documents,
        pairs=[(i, i) for i in range(len(queries))],
        joined=ids,
        joined_type_starts=_type_starts(fields.type_starts, ids),
        truncate=fields.truncate is not False,
        instruction=fields.instruction,
        top_n=top_n,
        return_documents=return_documents,
        fields=("pairs", "pairs", "pairs"),
    )


def _check_joined(i: int, pair: list[Any]) -> None:
    if not pair or any(type(token) is not int for token in pair):
        text = f"pairs[{i}] is not a list of token ids, as pairs[0] is"
        raise InvalidRequest(text, param=f"pairs[{i}]")


def _two_texts(i: int, pair: list[Any]) -> tuple[Text, Text]:
    if len(pair) != 2 or any(type(part) is int for part in pair):
        text = f"pairs[{i}] must be two texts, or one list of token ids in every pair"
        raise InvalidRequest(text, param=f"pairs[{i}]")
    for part in pair:
        if not part:
            raise InvalidRequest(f"pairs[{i}] holds an empty text; give two that are not", param=f"pairs[{i}]")
    return pair[0], pair[1]


def _type_starts(starts: list[int] | None, joined: list[list[int]]) -> list[int]:
    if starts is None:
        return []
    if len(starts) != len(joined):
        text = (
            f"type_starts has {len(starts)} items; give one for each of the {len(joined)} lists of token ids in pairs"
        )
        raise InvalidRequest(text, param="type_starts")
    for i, start in enumerate(starts):
        if start > len(joined[i]):
            text = f"type_starts[{i}] is {start}, but pairs[{i}] has {len(joined[i])} token ids"
            raise InvalidRequest(text, param=f"type_starts[{i}]")
    return starts


def _require(**fields: object) -> None:
    for name, value in fields.items():
        if value is None:
            raise InvalidRequest(f"{name} is missing; give it, or pairs instead", param=name)


def _refuse_type_starts(fields: PairsBody) -> None:
    if fields.type_starts is not None:
        raise InvalidRequest("type_starts goes with pairs of joined token ids only; leave it out", param="type_starts")


def _refuse_beside_pairs(**fields: object) -> None:
    for name, value in fields.items():
        if value is not None:
            raise InvalidRequest(f"{name} and pairs exclude each other; leave one out", param=name)

"""Every dialect's routes. A new dialect is one file and its lines here."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from gateway.dialects import openai, rerank
from gateway.tasks import Task


class Dialect(Struct, frozen=True):
    """`parse(body) -> Task` raises InvalidRequest; `render(task, outcome) -> body`. Both are pure."""

    route: str
    parse: Callable[[bytes], Task]
    render: Callable[[Any, Any], bytes]


DIALECTS = (
    Dialect("/v1/embeddings", openai.parse_embeddings, openai.render_embeddings),
    Dialect("/v1/rerank", rerank.parse_rerank, rerank.render_rerank),
    Dialect("/v1/score", rerank.parse_score, rerank.render_score),
)

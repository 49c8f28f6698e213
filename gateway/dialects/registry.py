"""Every dialect's routes. A new dialect is one file and its lines here."""

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from gateway.dialects import openai, openai_chat, openai_completions, rerank
from gateway.tasks import GenerateTask, Head, Piece, Task, Usage


class Events(Protocol):
    """Writes one streamed answer, as server-sent events."""

    def pieces(self, pieces: list[Piece]) -> bytes:
        """Events for what is new, in order."""

    def usage(self, usage: Usage) -> bytes:
        """The event that tells the counts, at the end."""


class Dialect(Struct, frozen=True):
    """`parse(body) -> Task` raises InvalidRequest; `render(task, outcome) -> body`. All are pure.

    `events` is for routes that generate, and makes the writer of a streamed answer.
    """

    route: str
    parse: Callable[[bytes], Task]
    render: Callable[[Any, Any], bytes]
    events: Callable[[GenerateTask, Head], Events] | None = None


DIALECTS = (
    Dialect("/v1/embeddings", openai.parse_embeddings, openai.render_embeddings),
    *(Dialect(route, rerank.parse_rerank, rerank.render_rerank) for route in ("/v1/rerank", "/v2/rerank", "/rerank")),
    Dialect("/v1/score", rerank.parse_score, rerank.render_score),
    Dialect(
        "/v1/completions",
        openai_completions.parse_completions,
        openai_completions.render_completions,
        openai_completions.CompletionEvents,
    ),
    Dialect("/v1/chat/completions", openai_chat.parse_chat, openai_chat.render_chat, openai_chat.ChatEvents),
)

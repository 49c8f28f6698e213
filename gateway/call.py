"""One request on its way through the handlers: what it has been given, and where its time went."""

from msgspec import Struct

from gateway.answer import JSON_HEADERS
from gateway.models import ServedModel
from gateway.state import Gateway
from ipc.types import ModelFacts, Priority, Timings

# About 0.3 ms of encoding; a thread's hand-over costs 0.1 ms and a loaded loop more.
INLINE_CHARS = 1000
QUICK_INLINE_CHARS = 3000  # where all words are looked up


class Call(Struct):
    gateway: Gateway
    model: ServedModel
    facts: ModelFacts
    priority: Priority
    deadline: float  # on the loop's clock
    tokenize_ms: float = 0.0
    timings: Timings | None = None

    def headers(self) -> dict[str, str]:
        """JSON, and where the time went."""
        if self.timings is None:
            return JSON_HEADERS
        return {
            "Content-Type": "application/json",
            "X-Tokenize-Ms": f"{self.tokenize_ms:.2f}",
            "X-Queue-Ms": f"{self.timings.queue_ms:.2f}",
            "X-Compute-Ms": f"{self.timings.compute_ms:.2f}",
        }

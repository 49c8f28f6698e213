"""A generation on its way: one chunk for each of a request's choices, and what is new of them.

The counterpart of job.Job. Knows token ids, no text; nor which replica would be best.
"""

import asyncio
from collections.abc import Callable

from msgspec import Struct

from gateway.errors import GatewayError, InternalError, NotReady, SlowRequest, TooLarge
from gateway.job import AbortReason, Chunk
from gateway.split import ChunkInput
from ipc.submit import TokenDelta
from ipc.types import Priority, SamplingParams, Timings

MAX_TAKEN = 500  # tokens and logprobs taken at a time: what is made of them holds up everybody, a few ms


class ChoiceInput(Struct):
    """What one choice is made of. `prompt` is the place of its prompt in the request, for errors."""

    prompt: int
    input_ids: bytes  # int32
    num_tokens: int
    sampling: SamplingParams
    cache_salt: bytes = b""


class News(Struct):
    """What came for one choice since the last look. `restarted`: forget what came before, the choice began anew."""

    deltas: list[TokenDelta]
    restarted: bool = False


class Keeping(Struct, frozen=True):
    """How much is kept for a client: tokens, and as much for each of their logprobs. Of an answer that `streams`, what
    it has not taken counts; of another, all of it."""

    max_tokens: int
    streams: bool

    def too_much(self) -> GatewayError:
        if self.streams:
            text = f"more than {self.max_tokens} tokens and logprobs were waiting to be sent; read the stream faster"
            return SlowRequest(text, code="client_too_slow")
        text = f"the answer has more than {self.max_tokens} tokens and logprobs; ask for less of them, or stream it"
        return TooLarge(text, code="answer_too_large")


class Generation:
    """The choices of one request: all of them to their ends, or an error and the rest aborted.

    A choice lost on its way begins anew elsewhere, unless something of it was `streamed` to the client.
    """

    def __init__(
        self,
        choices: list[ChoiceInput],
        priority: Priority,
        deadline: float,
        keeping: Keeping,
        forget: Callable[[Chunk], object],
    ) -> None:
        self.chunks = [
            Chunk(
                self,
                ChunkInput(choice.prompt, [choice.num_tokens], choice.input_ids, [], choice.num_tokens),
                priority,
                deadline,
                sampling=choice.sampling,
                cache_salt=choice.cache_salt,
            )
            for choice in choices
        ]
        self.streamed: set[int] = set()  # choices of which the client has seen something
        self._index = {chunk: i for i, chunk in enumerate(self.chunks)}
        self._forget = forget
        self._keeping = keeping
        self._num_kept = 0
        self._num_kept_of = [0] * len(choices)  # where all of an answer is kept
        self._num_new = 0  # tokens and logprobs in the news
        self._news: dict[int, News] = {}
        self._error: GatewayError | None = None
        self._waiting: asyncio.Future[None] | None = None  # for news

    async def news(self) -> dict[int, News]:
        """Waits for something new, and takes it; by choice. Nothing after `wake`. Of much that is new only a part is
        taken, and others get their turn first. Raises the GatewayError that ended the generation."""
        if self._num_new > MAX_TAKEN:
            await asyncio.sleep(0)
        if not self._news and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if self._error is not None:
            raise self._error
        if self._num_new > MAX_TAKEN:
            return self._part()
        news, self._news = self._news, {}
        self._took(self._num_new)
        return news

    def _part(self) -> dict[int, News]:
        """Of the choices that have waited longest."""
        taken: dict[int, News] = {}
        left = MAX_TAKEN
        while left > 0 and self._news:
            index = next(iter(self._news))
            news = self._news.pop(index)
            count = 0
            while left > 0 and count < len(news.deltas):
                left -= self._weight(news.deltas[count])
                count += 1
            taken[index] = News(news.deltas[:count], news.restarted)
            if count < len(news.deltas):
                self._news[index] = News(news.deltas[count:])
        self._took(MAX_TAKEN - left)
        return taken

    def _took(self, weight: int) -> None:
        self._num_new -= weight
        if self._keeping.streams:
            self._num_kept -= weight

    def _pass_over(self, index: int) -> None:
        """What is new of a choice and will not be taken."""
        if (news := self._news.pop(index, None)) is not None:
            self._took(sum(map(self._weight, news.deltas)))

    def _weight(self, delta: TokenDelta) -> int:
        """Tokens, and the likeliest ones beside each."""
        sampling = self.chunks[0].sampling  # but for seeds, that of all
        return (len(delta.tokens) + len(delta.prompt_logprobs)) * (1 + (sampling.logprobs or 0 if sampling else 0))

    def will_restart(self, index: int) -> bool:
        """Whether the next news of the choice is that it began anew: what was taken before is void."""
        news = self._news.get(index)
        return news is not None and news.restarted

    def wake(self) -> None:
        """Ends the waiting for news, though there may be none."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def end(self, index: int) -> None:
        """The choice has all it needs, by a stop string: nothing more is wanted of it."""
        self._pass_over(index)
        self.chunks[index].abort("stop", self._forget)

    def abort(self, reason: AbortReason) -> None:
        """Ends what is still in flight or waiting."""
        for chunk in self.chunks:
            chunk.abort(reason, self._forget)

    # ── what the client tells ───────────────────────────────────────────────────────────────────────────────

    def tokens(self, chunk: Chunk, delta: TokenDelta) -> None:
        if delta.finish_reason == "abort":
            self.failed(InternalError("the generation was ended by the server; try again"))
            return
        weight = self._weight(delta)
        self._num_kept += weight
        if self._num_kept > self._keeping.max_tokens:
            self.failed(self._keeping.too_much())
            return
        self._num_new += weight
        index = self._index[chunk]
        if not self._keeping.streams:
            self._num_kept_of[index] += weight
        news = self._news.get(index)
        if news is None:
            self._news[index] = News([delta])
            self.wake()
        else:
            news.deltas.append(delta)

    def succeeded(self, chunk: Chunk, payload: bytes, row_bytes: int, timings: Timings) -> None:
        self.failed(InternalError("a replica answered with vectors where tokens were asked for"))

    def failed(self, error: GatewayError) -> None:
        if self._error is None:
            self._error = error
            self.wake()
            self.abort("stop")

    def may_restart(self, chunk: Chunk) -> bool:
        if chunk.cancelled:
            return False
        index = self._index[chunk]
        if index in self.streamed:
            text = "the replica that generated this was lost after a part of the answer was sent; ask again"
            self.failed(NotReady(text, code="replica_lost", retry_after_ms=1000))
            return False
        self._pass_over(index)
        self._num_kept -= self._num_kept_of[index]
        self._num_kept_of[index] = 0
        self._news[index] = News([], restarted=True)
        self.wake()
        return True

"""All choices of one request, from the tokens that come for them to pieces of text. Knows no HTTP and no dialect."""

import asyncio
import time

from gateway.call import Call
from gateway.generate_job import Generation
from gateway.generate_prompt import Prompt
from gateway.generate_text import ChoiceText
from gateway.stop_strings import Matcher
from gateway.tasks import GenerateTask, Piece, Usage

INLINE_ENTRIES = 1000  # tokens and logprobs made ready on the loop, about 2 ms; more of them on the pool


class Choices:
    def __init__(self, call: Call, task: GenerateTask, prompts: list[Prompt], generation: Generation) -> None:
        self._call = call
        self._task = task
        self._prompts = prompts
        self._generation = generation
        self._stops = Matcher(task.stop) if task.stop else None
        self._texts = [self._text(i) for i in range(task.num_choices)]
        self._open = set(range(task.num_choices))
        self._metrics = call.gateway.metrics
        self._started_at = time.perf_counter()
        self._told_at: dict[int, float] = {}

    @property
    def done(self) -> bool:
        return not self._open

    async def next(self) -> list[Piece]:
        """Waits for news, and gives what the client gets to see of it, in order; it may be nothing."""
        pieces = []
        for index, news in (await self._generation.news()).items():
            if news.restarted:
                self._texts[index] = self._text(index)
            for delta in news.deltas:
                if index not in self._open:
                    break  # its stop string came in the delta before
                if delta.tokens:
                    self._observe(index, len(delta.tokens))
                if delta.timings is not None:
                    self._call.timings = delta.timings
                text = self._texts[index]
                if text.num_entries(delta) <= INLINE_ENTRIES:
                    piece = text.add(delta)
                else:
                    loop = asyncio.get_running_loop()
                    piece = await loop.run_in_executor(self._call.gateway.pool, text.add, delta)
                if piece is None:
                    continue
                if piece.finish_reason is not None:
                    self._open.discard(index)
                    self._generation.end(index)
                    self._metrics.count_generation(piece.finish_reason)
                pieces.append(piece)
        # one may have been lost while another's piece was made on the pool
        return [piece for piece in pieces if not self._generation.will_restart(piece.choice)]

    def usage(self) -> Usage:
        """Prompts count once, however many choices they have."""
        return Usage(
            num_prompt_tokens=sum(len(prompt.input_ids) for prompt in self._prompts),
            num_tokens=sum(text.num_tokens for text in self._texts),
            num_cached_tokens=sum(text.num_cached_tokens for text in self._texts[:: self._task.n]),
            num_draft_tokens=sum(text.num_draft_tokens for text in self._texts),
            num_accepted_tokens=sum(text.num_accepted_tokens for text in self._texts),
        )

    def _text(self, index: int) -> ChoiceText:
        prompt = self._prompts[index // self._task.n]
        assert self._call.model.generator is not None, "check_model has seen it"
        return ChoiceText(index, self._task, self._call.model.generator.token_bytes, prompt, self._stops)

    def _observe(self, index: int, num_tokens: int) -> None:
        now = time.perf_counter()
        before = self._told_at.get(index)
        self._told_at[index] = now
        self._metrics.generated_tokens += num_tokens
        if before is None:
            self._metrics.first_token_seconds.observe(now - self._started_at)
        else:
            self._metrics.inter_token_seconds.observe((now - before) / num_tokens)

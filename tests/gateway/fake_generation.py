"""What a FakeScheduler says to a generation: tokens that follow from the prompt, a step at a time, as told."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ipc.submit import Submit, TokenChunk, TokenDelta
from ipc.types import Timings

Script = Callable[[list[int], Submit], list[int]]


def echo(prompt: list[int], submit: Submit) -> list[int]:
    """The prompt again and again."""
    assert submit.sampling is not None
    return (prompt * (submit.sampling.max_tokens // len(prompt) + 1))[: submit.sampling.max_tokens]


def logprob(token: int) -> float:
    return -0.25 * (token % 16) - 0.125


@dataclass
class Sequence:
    """One generation that runs at the fake."""

    identity: bytes
    submit: Submit
    prompt: list[int]
    tokens: list[int]
    sent: int = 0
    num_drafts: tuple[int, int] = (0, 0)  # of each step, and of them accepted

    def delta(self, count: int, eos: tuple[int, ...]) -> TokenDelta:
        """The next `count` tokens, with all that the submit asked for."""
        sampling = self.submit.sampling
        assert sampling is not None
        first = self.sent == 0
        new = self.tokens[self.sent : self.sent + count]
        self.sent += len(new)
        reason = None
        if self.sent == len(self.tokens):
            stops = {*eos, *sampling.stop_token_ids} if not sampling.ignore_eos else {*sampling.stop_token_ids}
            reason = "stop" if new and new[-1] in stops else "length"
        top = [[(3 + (token + k) % 200, logprob(token) - k) for k in range(sampling.logprobs or 0)] for token in new]
        prompt_k = sampling.prompt_logprobs
        rest = self.prompt[1:] if first and prompt_k is not None else []
        return TokenDelta(
            chunk_id=self.submit.chunk_id,
            tokens=new,
            logprobs=[] if sampling.logprobs is None else [logprob(token) for token in new],
            top_logprobs=top if sampling.logprobs else [],
            prompt_logprobs=[logprob(token) for token in rest],
            prompt_top_logprobs=[[(3 + (t + k) % 200, logprob(t) - k) for k in range(prompt_k or 0)] for t in rest],
            finish_reason=reason,  # type: ignore[arg-type]
            num_prompt_tokens=len(self.prompt) if reason else 0,
            num_cached_tokens=len(self.prompt) // 2 if first or reason else 0,
            num_draft_tokens=self.num_drafts[0],
            num_accepted_tokens=self.num_drafts[1],
            timings=Timings(0.5, 1.5) if first or reason else None,
        )


@dataclass
class Generations:
    """The sequences in their order. `free` lets them run; else they wait for `step`."""

    send: Callable[[bytes, TokenChunk], None]
    eos: tuple[int, ...]
    script: Script = echo
    free: bool = True
    step_s: float = 0.0
    tokens_per_step: int = 1
    num_drafts: tuple[int, int] = (0, 0)
    running: dict[int, Sequence] = field(default_factory=dict)
    scheduled: bool = False

    def add(self, identity: bytes, submit: Submit, frame: bytes) -> None:
        prompt = np.frombuffer(frame, np.int32).tolist()
        self.running[submit.chunk_id] = Sequence(
            identity, submit, prompt, self.script(prompt, submit), num_drafts=self.num_drafts
        )
        self._soon()

    def drop(self, chunk_id: int) -> None:
        self.running.pop(chunk_id, None)

    def step(self, count: int | None = None) -> None:
        """`count` further tokens of everything that runs, in one message."""
        deltas = []
        for chunk_id, sequence in list(self.running.items()):
            deltas.append((sequence, sequence.delta(count or self.tokens_per_step, self.eos)))
            if deltas[-1][1].finish_reason:
                del self.running[chunk_id]
        if deltas:
            sequence = deltas[0][0]
            self.send(sequence.identity, TokenChunk(sequence.submit.gateway, [delta for _, delta in deltas]))

    def release(self) -> None:
        self.free = True
        self._soon()

    def _soon(self) -> None:
        if self.free and not self.scheduled:
            self.scheduled = True
            asyncio.get_running_loop().call_later(self.step_s, self._turn)

    def _turn(self) -> None:
        self.scheduled = False
        if self.free and self.running:
            self.step()
            self._soon()

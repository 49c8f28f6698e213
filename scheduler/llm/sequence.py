"""One generation as the planner knows it, but for the numbers that whole steps work on (lanes.py)."""

from array import array
from dataclasses import dataclass, field

from ipc.codec import encode
from ipc.submit import Submit
from ipc.types import SamplingParams
from scheduler.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """Waits (in the pool's queue or held as a suspect), runs in a slot of the ranks, or is done.

    `ids` are the prompt and what has been sent to the client, nothing else. All of them are to be computed when it
    enters a slot (`prefill_end`): a preempted or lost sequence comes back with its output as part of its prompt.
    """

    request: Request
    params: SamplingParams
    packed_params: bytes  # msgpack, for the rank
    ids: "array[int]"
    num_prompt: int
    limit: int  # tokens at which it ends by length
    stops: frozenset[int]  # stop_token_ids
    order: tuple[bool, int]  # (bulk, arrival): who comes first in a step and last in preemption
    gateway: int
    chunk_id: int
    lane: int = -1
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # prefill tokens in steps sent, prefix hits included
    num_answered: int = 0  # … in steps answered
    prefill_end: int = 0
    num_registered: int = 0  # blocks offered for prefix hits
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    num_awaited: int = -1  # blocks that hit when it began to wait for more, which others compute
    awaited_since: int = 0  # the step it then was not in
    num_cached: int = -1  # prompt tokens that hit when it first entered a slot
    num_prompt_logprobs: int = 0  # sent
    held: bool = False  # waits for a trial, in no queue
    done: bool = False

    @classmethod
    def from_request(cls, request: Request, arrival: int) -> "Sequence":
        """Of a request that the door has opened."""
        submit, num_prompt, params = request.submit, request.num_tokens, request.submit.sampling
        assert params is not None
        return cls(
            request=request,
            params=params,
            packed_params=encode(params),
            ids=array("i", bytes(request.frame)),
            num_prompt=num_prompt,
            limit=num_prompt + params.max_tokens,
            stops=frozenset(params.stop_token_ids),
            order=(submit.priority == "bulk", arrival),
            gateway=submit.gateway,
            chunk_id=submit.chunk_id,
        )

    # --- what the pool asks ---------------------------------------------------------------------------------

    @property
    def submit(self) -> Submit:
        return self.request.submit

    @property
    def deadline(self) -> float:
        return self.request.deadline

    @property
    def num_tokens(self) -> int:
        """The prompt's: what an output will take of memory is the blocks' affair."""
        return self.num_prompt

    @property
    def has_todo(self) -> bool:
        return not self.held

    # --- its state ------------------------------------------------------------------------------------------

    @property
    def is_bulk(self) -> bool:
        return self.order[0]

    @property
    def prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def num_settled(self) -> int:
        """Tokens whose keys and values lie in its blocks for good: the steps that computed them were answered."""
        return len(self.ids) - 1 if len(self.ids) > self.prefill_end else self.num_answered

    def may_wait(self, num_hits: int, step: int, num_steps: int) -> bool:
        """Whether it may stay out of `step` for more hits: for `num_steps` at a time if nothing comes of it."""
        if num_hits > self.num_awaited:
            self.num_awaited, self.awaited_since = num_hits, step
        return step - self.awaited_since < num_steps

    def enter(self, slot: int, hits: list[int], num_hit_tokens: int) -> None:
        """Into a slot, with blocks that hold its first `num_hit_tokens` tokens."""
        self.slot, self.blocks, self.prefill_end = slot, hits, len(self.ids)
        self.num_computed = self.num_answered = num_hit_tokens
        self.num_registered = len(hits)
        if self.num_cached < 0:
            self.num_cached = num_hit_tokens

    def leave(self) -> None:
        """Out of its slot; rows already sent go on."""
        self.slot, self.blocks = -1, []
        self.num_computed = self.num_answered = self.num_registered = 0

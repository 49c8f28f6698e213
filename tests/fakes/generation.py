"""A generation planner without policy worth the name: it exists to prove the contract of a generate step.

Pure like the real ones (scheduler/planner.py): slots and generations, 16-token blocks, prefix hits, chunked
prefill, verify rows, tokens one step late, preemption by recompute, aborts, failed steps and lost epochs. It
knows of a rank only what StepPlan, StepResult and the slot arrays say.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable

from ipc.codec import encode
from ipc.step import KIND_DECODE, KIND_PREFILL, KIND_VERIFY, STATUS_OK, StepFailed, StepPlan, StepResult
from ipc.step_ring import MAX_PROMPT_LOGPROBS, MIN_PARAMS_BYTES, Arrays
from ipc.submit import RejectCode, Rejected, TokenChunk, TokenDelta
from ipc.types import MAX_ATTEMPTS, FinishReason, ModelFacts, SamplingParams
from scheduler.planner import Reply
from scheduler.request import Request
from tests.fakes.generation_state import BlockPool, Row, Sequence, Tables

STATUS_CODES: dict[int, RejectCode] = {1: "invalid", 2: "non_finite"}


class FakeGenerationPlanner:
    """`draft_length(num_seqs)` is k for a pure decode step; `epoch` is set by whoever joins ranks."""

    def __init__(self, facts: ModelFacts, draft_length: Callable[[int], int]) -> None:
        self.facts = facts
        self.epoch = 0
        self.step = 0
        self.last_applied = 0
        self.num_preemptions = self.num_hit_tokens = 0
        self.waiting: list[Sequence] = []  # in order of arrival, as is
        self.running: list[Sequence] = []
        self._draft_length = draft_length
        self._arrivals = 0
        self._generation = 0
        self._live: dict[tuple[int, int], Sequence] = {}
        self._rewound_step = 0
        self._halve = False
        self._reset()

    def _reset(self) -> None:
        self.blocks = BlockPool(self.facts.num_blocks, self.facts.block_size)
        self.free_slots = deque(range(self.facts.max_num_seqs))
        self.sent: deque[tuple[int, list[Row]]] = deque()
        self._releases: list[tuple[int, int]] = []

    # --- requests come and go -----------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Rejected | None:
        submit, tokens = request.submit, request.input_ids.tolist()
        params = submit.sampling or SamplingParams()
        limit = min(len(tokens) + params.max_tokens, self.facts.max_model_len)
        fits = 0 < len(tokens) < limit and self._blocks_for(limit) <= self.facts.num_blocks
        if not fits or len(encode(params)) > MIN_PARAMS_BYTES:
            return Rejected(submit.gateway, submit.chunk_id, "invalid", "it can never run")
        self._arrivals += 1
        sequence = Sequence(submit, self._arrivals, tokens, len(tokens), limit, submit.attempt)
        self._live[submit.gateway, submit.chunk_id] = sequence
        self.waiting.append(sequence)
        return None

    def abort(self, gateway: int, chunk_id: int | None, reason: str) -> list[Reply]:
        keys = [key for key in self._live if key[0] == gateway and chunk_id in (None, key[1])]
        return [self._reject(self._live[key], "aborted", reason) for key in keys]

    def lost(self, epoch: int, ordered: bool, now: float) -> list[Reply]:
        """Every sequence begins again: its prompt and what was emitted are the next prompt."""
        if epoch != self.epoch:
            return []
        replies = []
        for sequence in sorted(self._live.values(), key=_arrival):
            sequence.attempt += int(sequence.num_in_flight > 0 and not ordered)
            sequence.num_in_flight = sequence.min_new = sequence.max_new = 0
            if sequence.slot >= 0:
                self._stop_running(sequence)
                insort(self.waiting, sequence, key=_arrival)
            if sequence.attempt > MAX_ATTEMPTS:
                replies.append(self._reject(sequence, "lost", "its ranks died too often"))
        self._reset()
        self.last_applied = self.step
        return replies

    def _reject(self, sequence: Sequence, code: RejectCode, message: str) -> Reply:
        self._end(sequence)
        submit = sequence.submit
        return Reply(submit.gateway, Rejected(submit.gateway, submit.chunk_id, code, message, attempt=sequence.attempt))

    def _end(self, sequence: Sequence) -> None:
        sequence.done = True
        del self._live[sequence.submit.gateway, sequence.submit.chunk_id]
        if sequence.slot >= 0:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        """Slot and blocks are free for the next plan: steps already sent run before it."""
        self.running.remove(sequence)
        self._releases.append((sequence.slot, sequence.generation))
        self.free_slots.append(sequence.slot)
        self.blocks.give_back(sequence.blocks)
        sequence.leave()

    # --- the next step ------------------------------------------------------------------------------------

    def plan(self, now: float, slot: int, arrays: Arrays) -> tuple[StepPlan | None, list[Reply]]:
        tables = Tables(self.step + 1)
        budget = self.facts.max_num_batched_tokens // (2 if self._halve else 1)
        budget = self._plan_decodes(tables, budget)
        budget = self._plan_prefills(tables, budget)
        self._admit(tables, budget)
        if not tables.rows and not self._releases:
            return None, []
        tables.releases, self._releases = self._releases, []
        self.step += 1
        self.sent.append((self.step, tables.rows))
        return tables.write(arrays, self.epoch, slot, self.last_applied), []

    def _plan_decodes(self, tables: Tables, budget: int) -> int:
        decoding = [sequence for sequence in self.running if sequence.wants_row]
        pure = not self.waiting and not any(sequence.prefilling for sequence in self.running)
        tables.draft_length = self._draft_length(len(decoding)) if pure and decoding else 0
        for sequence in decoding:
            known, k = len(sequence.tokens), tables.draft_length
            drafts = min(k, sequence.limit - known - sequence.min_new - 1)
            bound = known + sequence.max_new + drafts
            # one preempted for an earlier row of this step has no slot; tokens past the limit need no memory
            if budget < 1 + k or sequence.slot < 0 or not self._reserve(sequence, min(bound, sequence.limit), tables):
                continue
            kind = KIND_VERIFY if k else KIND_DECODE
            tables.add_row(Row(sequence, sequence.generation, kind, 1 + drafts, True, 0, drafts, bound))
            budget -= 1 + k
        return budget

    def _plan_prefills(self, tables: Tables, budget: int) -> int:
        for sequence in [sequence for sequence in self.running if sequence.prefilling]:
            count = self._chunk(sequence, budget, tables)
            if count and sequence.slot >= 0 and self._reserve(sequence, sequence.num_computed + count, tables):
                budget -= self._add_prefill(sequence, count, tables)
        return budget

    def _admit(self, tables: Tables, budget: int) -> None:
        while self.waiting and self.free_slots and budget and not self.waiting[0].num_in_flight:
            sequence = self.waiting[0]
            params = encode(sequence.params)
            if len(tables.params) + len(params) > MIN_PARAMS_BYTES:
                return
            hits = [] if sequence.params.prompt_logprobs is not None else self.blocks.hits(sequence)
            num_hit_tokens = len(hits) * self.facts.block_size
            sequence.prefill_end, sequence.num_computed = len(sequence.tokens), num_hit_tokens
            count = self._chunk(sequence, budget, tables)
            missing = self._blocks_for(num_hit_tokens + count) - len(hits)
            no_room = tables.num_hit_tokens + num_hit_tokens > self.facts.max_model_len
            if not count or no_room or missing > len(self.blocks.free):
                self.blocks.give_back(hits)
                sequence.leave()
                return
            self._enter_slot(self.waiting.pop(0), hits, params, tables)
            assert self._reserve(sequence, num_hit_tokens + count, tables)
            budget -= self._add_prefill(sequence, count, tables)

    def _enter_slot(self, sequence: Sequence, hits: list[int], params: bytes, tables: Tables) -> None:
        self._generation += 1
        sequence.slot, sequence.generation = self.free_slots.popleft(), self._generation
        sequence.blocks, sequence.num_registered = hits, len(hits)
        insort(self.running, sequence, key=_arrival)
        num_ids, num_params = len(tables.input_ids), len(tables.params)
        where = (sequence.slot, sequence.generation, sequence.num_prompt, sequence.num_computed)
        tables.admissions.append((*where, num_params, len(params), num_ids))
        tables.input_ids += sequence.tokens[: sequence.num_computed]
        tables.params += params
        tables.num_hit_tokens += sequence.num_computed
        tables.new_blocks += [(sequence.slot, index, block) for index, block in enumerate(hits)]
        self.num_hit_tokens += sequence.num_computed
        sequence.num_cached = sequence.num_cached or sequence.num_computed

    def _chunk(self, sequence: Sequence, budget: int, tables: Tables) -> int:
        """Prefill tokens that `sequence` may compute in this step."""
        if sequence.params.prompt_logprobs is not None:
            num_lines = sum(row.num_tokens for row in tables.rows if row.asks_prompt_logprobs)
            budget = min(budget, MAX_PROMPT_LOGPROBS - num_lines)
        return max(0, min(budget, sequence.prefill_end - sequence.num_computed))

    def _add_prefill(self, sequence: Sequence, count: int, tables: Tables) -> int:
        start, end = sequence.num_computed, sequence.num_computed + count
        last = end == sequence.prefill_end
        offset = len(tables.input_ids)
        tables.input_ids += sequence.tokens[start : end if last else end + 1]
        tables.add_row(Row(sequence, sequence.generation, KIND_PREFILL, count, last, offset, 0, end))
        return count

    def _reserve(self, sequence: Sequence, num_tokens: int, tables: Tables) -> bool:
        """Blocks for `num_tokens` tokens, if need be from the youngest that has no row in this step."""
        missing = self._blocks_for(num_tokens) - len(sequence.blocks)
        busy = {id(row.sequence) for row in tables.rows}
        while missing > len(self.blocks.free):
            victim = next((other for other in reversed(self.running) if id(other) not in busy), sequence)
            self._stop_running(victim)
            insort(self.waiting, victim, key=_arrival)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        if missing > 0:
            first = len(sequence.blocks)
            sequence.blocks += self.blocks.take(missing)
            tables.new_blocks += [(sequence.slot, i, b) for i, b in enumerate(sequence.blocks[first:], first)]
        return True

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.facts.block_size)

    # --- outcomes -----------------------------------------------------------------------------------------

    def apply(self, result: StepResult | StepFailed, arrays: Arrays, now: float) -> list[Reply]:
        step, rows = self.sent.popleft()
        assert (result.epoch, result.step) == (self.epoch, step), "outcomes come in the order of steps"
        self.last_applied = step
        self._halve = isinstance(result, StepFailed)
        for row in rows:
            row.sequence.num_in_flight -= 1
            row.sequence.min_new -= int(row.sample)
            row.sequence.max_new -= row.max_new
        if isinstance(result, StepFailed):
            if step > self._rewound_step:
                self._rewind(rows)
            return []
        deltas: dict[int, list[TokenDelta]] = {}
        replies: list[Reply] = []
        prompt_line = 0
        for index, row in enumerate(rows):
            sequence, logprobs = row.sequence, []
            if row.asks_prompt_logprobs:
                logprobs = arrays["prompt_logprobs"][prompt_line : prompt_line + row.num_tokens].tolist()
                prompt_line += row.num_tokens
            if sequence.done:
                continue
            if (status := int(arrays["status"][index])) != STATUS_OK:
                replies.append(self._reject(sequence, STATUS_CODES[status], "the row failed"))
            elif delta := self._take(row, index, arrays, logprobs):
                deltas.setdefault(sequence.submit.gateway, []).append(delta)
        return replies + [Reply(gateway, TokenChunk(gateway, found)) for gateway, found in deltas.items()]

    def _rewind(self, rows: list[Row]) -> None:
        """The steps in flight were planned on top of the failed one, and will fail with it."""
        for row in rows + [row for _, later in self.sent for row in later]:
            if row.kind == KIND_PREFILL and row.runs:
                row.sequence.num_computed = min(row.sequence.num_computed, row.start)
        self._rewound_step = self.step

    def _take(self, row: Row, index: int, arrays: Arrays, prompt_logprobs: list[float]) -> TokenDelta | None:
        """Applies a good row to its sequence."""
        sequence = row.sequence
        tokens, finish = [], None
        for token in arrays["tokens"][index, : int(arrays["num_tokens"][index])].tolist():
            tokens.append(token)
            if finish := self._finish(sequence, token, len(tokens)):
                break
        sequence.tokens += tokens
        sequence.num_drafts += int(arrays["num_drafts"][index])
        sequence.num_accepted += max(0, int(arrays["num_tokens"][index]) - 1)
        if row.runs and not finish:
            length = row.max_length if row.kind == KIND_PREFILL and not row.sample else len(sequence.tokens)
            assert int(arrays["lengths"][index]) == length, "scheduler and rank have diverged"
            self.blocks.register(sequence, row.max_length if row.kind == KIND_PREFILL else length - 1)
        # a line says how likely the next token was: none for the prompt's last; a replay repeats lines sent before
        stop = max(0, sequence.num_prompt - 1 - row.start)
        prompt_logprobs = prompt_logprobs[max(0, sequence.num_prompt_logprobs - row.start) : stop]
        sequence.num_prompt_logprobs += len(prompt_logprobs)
        if finish:
            self._end(sequence)
        if not tokens and not prompt_logprobs:
            return None
        return TokenDelta(
            sequence.submit.chunk_id,
            tokens,
            arrays["logprobs"][index, : len(tokens)].tolist(),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            num_prompt_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.num_cached,
            num_draft_tokens=sequence.num_drafts,
            num_accepted_tokens=sequence.num_accepted,
        )

    def _finish(self, sequence: Sequence, token: int, num_new: int) -> FinishReason | None:
        if token in self.facts.eos_token_ids and not sequence.params.ignore_eos:
            return "stop"
        return "length" if len(sequence.tokens) + num_new == sequence.limit else None


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival

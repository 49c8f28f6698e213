"""A generate step's answer into its sequences: tokens, endings and the deltas that gateways get.

Decode rows are applied as arrays, and one by one only as far as each needs objects of its own. Knows nothing of pools
and suspects: what ended or failed is handed back.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc.step import STATUS_OK
from ipc.step_ring import Arrays
from ipc.submit import TokenDelta
from ipc.types import FinishReason, ModelFacts, Timings
from scheduler.llm.endings import Endings, find_endings
from scheduler.llm.figures import Figures, observe_all
from scheduler.llm.lanes import Flags, Ints
from scheduler.llm.residents import Residents
from scheduler.llm.sequence import Sequence
from scheduler.llm.tables import Prefill, Step
from scheduler.planner import Diverged


class Taken(NamedTuple):
    """What came of a step."""

    deltas: dict[int, list[TokenDelta]]  # by gateway
    ended: list[Sequence]  # whose terminal delta is among them
    failed: list[tuple[Sequence, int]]  # with the row's status


class DraftCounts(NamedTuple):
    """Of each row of a step."""

    num_drafts: list[int]
    num_accepted: list[int]  # of the tokens that its client gets

    def of(self, index: int) -> dict[str, int]:
        """Fields of the row's delta."""
        return {"num_draft_tokens": self.num_drafts[index], "num_accepted_tokens": self.num_accepted[index]}


def check_answer(step: Step, arrays: Arrays, residents: Residents) -> None:
    """Raises Diverged where the rank's slots cannot be what the planner knows of them. Changes nothing."""
    lanes, n = residents.lanes, step.num_rows
    counts, lengths = _ints(arrays["num_tokens"][:n]), _ints(arrays["lengths"][:n])
    expected = lanes.known[step.lanes] + counts
    for index, row in enumerate(step.prefills, step.num_decodes):
        if not row.sample:
            expected[index] = row.end
    wrong = (lengths != expected) | (counts < step.samples) | (counts > step.max_new)
    wrong &= (arrays["status"][:n] == STATUS_OK) & ~lanes.done[step.lanes]
    if wrong.any():
        index = int(wrong.argmax())
        raise Diverged(
            f"row {index} of step {step.step} gave {counts[index]} tokens of {step.samples[index]:d} to "
            f"{step.max_new[index]}, and its slot holds {lengths[index]} where {expected[index]} are known"
        )


class Answers:
    def __init__(self, facts: ModelFacts, residents: Residents, figures: Figures) -> None:
        self._facts = facts
        self._residents = residents
        self._lanes = residents.lanes
        self._figures = figures

    def take(self, step: Step, arrays: Arrays, compute_us: int, now: float) -> Taken:
        """Of a step that went well and was found in order by `check_answer`."""
        lanes, rows, n = self._lanes, step.lanes, step.num_rows
        taken = Taken(defaultdict(list), [], [])
        good = arrays["status"][:n] == STATUS_OK
        alive = ~lanes.done[rows]
        counts = _ints(arrays["num_tokens"][:n]) * (good & alive)
        tokens = _ints(arrays["tokens"][:n, : step.draft_length + 1])
        endings = find_endings(rows, tokens, counts, lanes, self._facts.eos_token_ids)
        drafts = self._count(step, endings.taken, counts, arrays, compute_us)
        self._observe(rows, endings.taken, now)
        lanes.known[rows] += endings.taken
        special = endings.ended | ~good | ~alive | lanes.wants_logprobs[rows]
        special[step.num_decodes :] = True
        lists = tokens.tolist()
        if step.draft_length:
            lists = [row[:count] for row, count in zip(lists, endings.taken.tolist(), strict=True)]
        self._take_plain(rows, lists, special, drafts, taken)
        prompt_lines = self._prompt_lines(step)
        for index in np.flatnonzero(special & alive).tolist():
            sequence = lanes.at(int(rows[index]))
            if not good[index]:
                taken.failed.append((sequence, int(arrays["status"][index])))
                continue
            prompt = step.prefills[index - step.num_decodes] if index >= step.num_decodes else None
            new = lists[index][: int(endings.taken[index])]
            if prompt is not None:
                self._prefilled(prompt, int(step.generations[index]))
            self._take_one(
                sequence, index, new, prompt, prompt_lines.get(index, 0), endings, arrays, drafts, taken
            )  # fmt: skip
        return taken

    # --- rows -----------------------------------------------------------------------------------------------

    def _take_plain(
        self, rows: Ints, lists: list[list[int]], special: Flags, drafts: DraftCounts | None, taken: Taken
    ) -> None:
        """The rows that are nothing but tokens: this loop is most of what a large step costs."""
        sequences, deltas = self._lanes.sequences, taken.deltas
        for index, (lane, new, is_special) in enumerate(zip(rows.tolist(), lists, special.tolist(), strict=True)):
            if not is_special:
                sequence = sequences[lane]
                assert sequence is not None
                sequence.ids.extend(new)
                more = {} if drafts is None else drafts.of(index)
                deltas[sequence.gateway].append(TokenDelta(sequence.chunk_id, new, **more))  # type: ignore[arg-type]

    def _take_one(
        self,
        sequence: Sequence,
        index: int,
        new: list[int],
        prompt: Prefill | None,
        prompt_line: int,
        endings: Endings,
        arrays: Arrays,
        drafts: DraftCounts | None,
        taken: Taken,
    ) -> None:
        is_first = bool(new) and len(sequence.ids) == sequence.num_prompt
        sequence.ids.extend(new)
        delta: dict[str, object] = self._costs(sequence) if is_first else {}
        if sequence.params.logprobs is not None:
            delta |= _logprobs(arrays, index, len(new), sequence.params.logprobs)
        if prompt is not None and sequence.params.prompt_logprobs is not None:
            delta |= _prompt_logprobs(arrays, prompt, prompt_line)
        if endings.ended[index]:
            delta |= self._ending(sequence, "stop" if endings.stopped[index] else "length")
            taken.ended.append(sequence)
        if drafts is not None:
            delta |= drafts.of(index)
        if new or delta:
            taken.deltas[sequence.gateway].append(TokenDelta(sequence.chunk_id, new, **delta))  # type: ignore[arg-type]

    def _prefilled(self, row: Prefill, generation: int) -> None:
        """A chunk was computed: its full blocks can be hit from now on, if the sequence still holds them."""
        sequence = row.sequence
        if self._lanes.generation[sequence.lane] == generation:
            sequence.num_answered = row.end
            self._residents.offer(sequence, row.end)

    def _prompt_lines(self, step: Step) -> dict[int, int]:
        """Row → its first line of prompt logprobs, for those that have some."""
        lines, line = {}, 0
        for index, row in enumerate(step.prefills, step.num_decodes):
            if row.num_lines:
                lines[index] = line
                line += row.num_lines
        return lines

    def _ending(self, sequence: Sequence, reason: FinishReason) -> dict[str, object]:
        return {"finish_reason": reason, "num_prompt_tokens": sequence.num_prompt} | self._costs(sequence)

    def _costs(self, sequence: Sequence) -> dict[str, object]:
        """What it took so far: told with the first token, since a stop string ends it without a terminal delta."""
        lanes, lane, request = self._lanes, sequence.lane, sequence.request
        return {
            "num_cached_tokens": min(sequence.num_cached, sequence.num_prompt),
            "timings": Timings(
                queue_ms=((request.first_step_at or request.arrival) - request.arrival) * 1000,
                compute_ms=float(lanes.compute_us[lane]) / 1000,
                num_steps=int(lanes.num_steps[lane]),
                num_retries=request.num_retries,
            ),
        }

    # --- figures --------------------------------------------------------------------------------------------

    def _count(self, step: Step, taken: Ints, counts: Ints, arrays: Arrays, compute_us: int) -> DraftCounts | None:
        """What clients are told of drafts."""
        lanes, rows, figures = self._lanes, step.lanes, self._figures
        lanes.num_steps[rows] += 1
        lanes.compute_us[rows] += compute_us
        figures.num_generated_tokens += int(taken.sum())
        figures.num_prefilled_tokens += sum(row.end - row.start for row in step.prefills)
        if not step.draft_length:
            return None
        drafts, accepted = _ints(arrays["num_drafts"][: len(rows)]) * (counts > 0), np.maximum(counts - 1, 0)
        figures.count_drafts(drafts, accepted)
        return DraftCounts(drafts.tolist(), np.minimum(accepted, taken).tolist())

    def _observe(self, rows: Ints, taken: Ints, now: float) -> None:
        """Times to the first token, and per token after it."""
        lanes, figures = self._lanes, self._figures
        got = taken > 0
        told = lanes.told_at[rows]
        again = got & (told > 0)
        if again.any():
            observe_all(figures.inter_token_seconds, (now - told[again]) / taken[again])
        for lane in rows[got & (told == 0)].tolist():
            sequence = lanes.at(lane)
            figures.num_prompt_tokens += sequence.num_prompt
            figures.first_token_seconds.observe(now - sequence.request.arrival)
        lanes.told_at[rows[got]] = now


def _ints(values: NDArray[np.generic]) -> Ints:
    return values.astype(np.int64)


def _logprobs(arrays: Arrays, index: int, count: int, num_top: int) -> dict[str, object]:
    found: dict[str, object] = {"logprobs": arrays["logprobs"][index, :count].tolist()}
    if num_top:
        ids = arrays["top_ids"][index, :count, :num_top].tolist()
        values = arrays["top_logprobs"][index, :count, :num_top].tolist()
        found["top_logprobs"] = [list(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
    return found


def _prompt_logprobs(arrays: Arrays, row: Prefill, line: int) -> dict[str, object]:
    """Lines that were not sent before: a replayed prompt repeats some. None says how likely an output token was."""
    sequence = row.sequence
    num_top = sequence.params.prompt_logprobs
    first = max(row.start, sequence.num_prompt_logprobs)
    end = min(row.end, sequence.num_prompt - 1)
    if end <= first:
        return {}
    sequence.num_prompt_logprobs = end
    start, stop = line + first - row.start, line + end - row.start
    found: dict[str, object] = {"prompt_logprobs": arrays["prompt_logprobs"][start:stop].tolist()}
    if num_top:
        ids = arrays["prompt_top_ids"][start:stop, :num_top].tolist()
        values = arrays["prompt_top_logprobs"][start:stop, :num_top].tolist()
        found["prompt_top_logprobs"] = [list(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
    return found

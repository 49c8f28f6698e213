"""Which tokens a structured output may go on with: llguidance's matchers, one a slot, and their masks.

A grammar is a string as `llguidance.LLMatcher` takes it; the gateway has made and checked it. Knows no text: tokens in,
bits out. Everything here runs on the host, while a forward pass runs.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"?|; byte .*')
_NUM_KEPT = 64  # compiled grammars; sequences of one request, and requests with one schema, share theirs


class GrammarError(ValueError):
    """A sequence's grammar cannot be followed here; it fails alone."""


class _Matcher:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_beyond = 0  # tokens after the grammar's end, which the matcher does not see

    def check(self) -> None:
        """Raises GrammarError."""
        if self.matcher.is_error():
            raise GrammarError(_reason(self.matcher.get_error()))


class Grammars:
    """Matchers of the sequences that have a grammar, by slot. Not for several threads.

    At a grammar's end nothing but end-of-sequence tokens may come, and these may come wherever the grammar is complete.
    A sequence that comes back (preempted, or replayed) is admitted anew, and its output accepted again.
    """

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._matchers: dict[int, _Matcher] = {}

    def admit(self, slot: int, grammar: str) -> None:
        """A sequence with a grammar enters a slot, whose mask then allows what the output may begin with.

        The first call loads the tokenizer (0.25 s for 49 thousand tokens). Raises GrammarError: the grammar, or the
        model's tokenizer, cannot be used.
        """
        self.release(slot)
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
        else:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
        self._matchers[slot] = _Matcher(self._compiled[grammar].deep_copy())

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens were put out, in order. Raises GrammarError: one that the grammar does not allow here.

        Nothing happens for a slot without a grammar.
        """
        state = self._matchers.get(slot)
        if state is None:
            return
        for token in tokens:
            if state.matcher.is_stopped() and not state.matcher.is_error():
                state.num_beyond += 1
            elif not state.matcher.consume_token(token):
                state.check()

    def rollback(self, slot: int, count: int) -> None:
        """Takes back the last `count` accepted tokens. Raises GrammarError: there were fewer."""
        state = self._matchers.get(slot)
        if state is None:
            return
        beyond = min(count, state.num_beyond)
        state.num_beyond -= beyond
        if count > beyond and not state.matcher.rollback(count - beyond):
            state.check()

    def fill(self, bitmask: NDArray[np.int32], slots: Sequence[int]) -> dict[int, GrammarError]:
        """Row i of the mask becomes what slots[i] may go on with, all ones for a slot without a grammar.

        bitmask int32 [R, ceil(vocab_size / 32)], contiguous; bit b of word w is token 32 · w + b. Rows are filled in
        parallel. Returns the rows whose grammar has failed (it outgrew a limit, say); their masks mean nothing.
        """
        present = [(self._matchers[slot].matcher, row) for row, slot in enumerate(slots) if slot in self._matchers]
        bitmask[: len(slots)] = -1
        if len(present) == 1:
            fill_next_token_bitmask(present[0][0], bitmask, present[0][1])
        elif present:
            self._executor = self._executor or LLExecutor()
            fill_next_token_bitmask_par(self._executor, present, bitmask)
        return {row: GrammarError(_reason(m.get_error())) for m, row in present if m.is_error()}

    def fill_ahead(self, bitmask: NDArray[np.int32], slot: int, tokens: Sequence[int]) -> None:
        """What may come after each further one of `tokens`, which are not put out: row i of the mask is after the first
        i, row 0 is there. Behind one that may not come rows stay as they are. int32 [len(tokens) + 1, words]."""
        state, count = self._matchers[slot], 0
        for token in tokens:
            if not bitmask[count, token >> 5] >> (token & 31) & 1:
                break
            self.accept(slot, [token])
            count += 1
            fill_next_token_bitmask(state.matcher, bitmask, count)
        self.rollback(slot, count)

    def release(self, slot: int) -> None:
        """The slot's sequence has no grammar any more."""
        self._matchers.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._matchers

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._load(), grammar, log_level=0)
        _Matcher(matcher).check()
        return matcher

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                text = self._path.read_text(encoding="utf-8")
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            except (OSError, ValueError) as error:
                text = f"the model's tokenizer cannot be used for structured output: {self._path}: {error}"
                raise GrammarError(text) from error
        return self._tokenizer


def _reason(text: str) -> str:
    """What llguidance says, without what it quotes of grammars and outputs: that belongs in no log."""
    return _QUOTED.sub("…", text.partition("\n")[0])

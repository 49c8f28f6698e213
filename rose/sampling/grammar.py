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
        self._matchers: dict[int, LLMatcher] = {}

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
        self._matchers[slot] = self._compiled[grammar].deep_copy()

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens were put out, in order. Raises GrammarError: one that the grammar does not allow here.

        Nothing happens for a slot without a grammar.
        """
        matcher = self._matchers.get(slot)
        if matcher is None:
            return
        for token in tokens:
            is_over = matcher.is_stopped() and not matcher.is_error()
            if not is_over and not matcher.consume_token(token):
                _check(matcher)

    def fill(self, bitmask: NDArray[np.int32], slots: Sequence[int]) -> dict[int, GrammarError]:
        """Row i of the mask becomes what slots[i] may go on with, all ones for a slot without a grammar.

        bitmask int32 [R, ceil(vocab_size / 32)], contiguous; bit b of word w is token 32 · w + b. Rows are filled in
        parallel. Returns the rows whose grammar has failed (it outgrew a limit, say); their masks mean nothing.
        """
        present = [(self._matchers[slot], row) for row, slot in enumerate(slots) if slot in self._matchers]
        bitmask[: len(slots)] = -1
        if len(present) == 1:
            fill_next_token_bitmask(present[0][0], bitmask, present[0][1])
        elif present:
            self._executor = self._executor or LLExecutor()
            fill_next_token_bitmask_par(self._executor, present, bitmask)
        return {row: GrammarError(_reason(m.get_error())) for m, row in present if m.is_error()}

    def fill_ahead(self, bitmask: NDArray[np.int32], slot: int, tokens: Sequence[int]) -> None:
        """What may come after each further one of `tokens`, which are not put out: row i of the mask is after the first
        i, row 0 is there. Behind one that may not come, or that the grammar fails at, rows stay as they are. int32
        [len(tokens) + 1, words], all ones behind row 0.

        On a copy, since a matcher does not recover from a failure: that of a token which is never put out is nobody's.
        """
        ahead = self._matchers[slot].deep_copy()
        for count, token in enumerate(tokens, start=1):
            allowed = bitmask[count - 1, token >> 5] >> (token & 31) & 1
            if not allowed or not (ahead.is_stopped() or ahead.consume_token(token)):
                return
            fill_next_token_bitmask(ahead, bitmask, count)
            if ahead.is_error():
                bitmask[count] = -1
                return

    def release(self, slot: int) -> None:
        """The slot's sequence has no grammar any more."""
        self._matchers.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._matchers

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._load(), grammar, log_level=0)
        _check(matcher)
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


def _check(matcher: LLMatcher) -> None:
    """Raises GrammarError."""
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))


def _reason(text: str) -> str:
    """What llguidance says, without what it quotes of grammars and outputs: that belongs in no log."""
    return _QUOTED.sub("…", text.partition("\n")[0])

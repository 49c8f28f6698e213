"""A sequence's SamplingParams as one line of an int32 table, and what a step of such sequences needs done.

Knows no tensors: a line is numpy. Floats stand in it by their bits.
"""

import secrets
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ipc.types import SamplingParams

# --- columns of a line; (f) is a float32's bits ------------------------------------------------------------
FLAGS = 0
SEED_LOW, SEED_HIGH = 1, 2
TOP_K = 3  # NO_TOP_K: off
TOP_P = 4  # as a fraction of 2^31; -1: off
MIN_TOKENS = 5
NUM_BIASES, NUM_STOPS = 6, 7  # entries of the slot's lists
INVERSE_TEMPERATURE = 8  # (f) 0: greedy
MIN_P = 9  # (f)
REPETITION, INVERSE_REPETITION, FREQUENCY, PRESENCE = 10, 11, 12, 13  # (f)
NUM_COLUMNS = 16

HAS_PENALTIES = 1  # in FLAGS
NO_TOP_K = 2**31 - 1
TOP_P_BITS = 31

MAX_BIASES = 1024  # entries of logit_bias
MAX_STOPS = 128  # tokens masked until min_tokens are there: end-of-sequence tokens and stop_token_ids
_MAX_INVERSE_TEMPERATURE = 1e30  # finite, so that the largest logit's weight stays 1


class UnusableParams(ValueError):
    """A sequence's parameters cannot be honoured here; it fails alone."""


class Needs(NamedTuple):
    """What at least one row of a step asks for; the rest is left out of its launches."""

    random: bool = False
    truncation: bool = False  # top_k, top_p, min_p
    penalties: bool = False
    edits: bool = False  # logit_bias, min_tokens
    logprobs: bool = False

    @classmethod
    def of(cls, params: SamplingParams) -> "Needs":
        random = params.temperature > 0
        truncates = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return cls(
            random=random,
            truncation=random and truncates,
            penalties=has_penalties(params),
            edits=bool(params.logit_bias) or params.min_tokens > 0,
            logprobs=params.logprobs is not None,
        )

    @classmethod
    def union(cls, rows: Iterable["Needs"]) -> "Needs":
        """Of a step with such rows."""
        return cls(*(any(column) for column in zip(cls(), *set(rows), strict=True)))


class Line(NamedTuple):
    """One slot's parameters. `table` int32 [NUM_COLUMNS]; the lists are as long as they are."""

    table: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    stop_ids: NDArray[np.int32]


def has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def make_line(params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int]) -> Line:
    """Raises UnusableParams: logit_bias names a token that the model has not, or a list is too long."""
    outside = [token for token in params.logit_bias if token >= vocab_size]
    if outside:
        raise UnusableParams(f"logit_bias names token {outside[0]}; the model's vocabulary has {vocab_size}")
    if len(params.logit_bias) > MAX_BIASES:
        raise UnusableParams(f"logit_bias has {len(params.logit_bias)} entries, at most {MAX_BIASES} are possible")
    ends = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
    stops = [token for token in ends if token < vocab_size]
    if len(stops) > MAX_STOPS:
        raise UnusableParams(f"min_tokens with {len(stops)} tokens that may end the text, at most {MAX_STOPS}")
    biases = sorted(params.logit_bias.items())
    return Line(
        _table(params, len(biases), len(stops)),
        np.array([token for token, _ in biases], np.int32),
        np.array([bias for _, bias in biases], np.float32),
        np.array(stops, np.int32),
    )


def _table(params: SamplingParams, num_biases: int, num_stops: int) -> NDArray[np.int32]:
    line = np.zeros(NUM_COLUMNS, np.int32)
    # a seed that nobody gave is drawn where the request begins; here only for callers without a gateway
    seed = (secrets.randbits(64) if params.seed is None else params.seed) & (2**64 - 1)
    line[[SEED_LOW, SEED_HIGH]] = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    line[FLAGS] = HAS_PENALTIES if has_penalties(params) else 0
    line[TOP_K] = params.top_k or NO_TOP_K
    line[TOP_P] = round(params.top_p * 2**TOP_P_BITS) if params.top_p < 1 - 2.0**-TOP_P_BITS else -1
    line[MIN_TOKENS] = params.min_tokens
    line[[NUM_BIASES, NUM_STOPS]] = num_biases, num_stops
    floats = line.view(np.float32)
    if params.temperature > 0:
        floats[INVERSE_TEMPERATURE] = min(1 / params.temperature, _MAX_INVERSE_TEMPERATURE)
    floats[MIN_P] = params.min_p
    floats[REPETITION] = params.repetition_penalty
    floats[INVERSE_REPETITION] = min(1 / params.repetition_penalty, _MAX_INVERSE_TEMPERATURE)
    floats[FREQUENCY] = params.frequency_penalty
    floats[PRESENCE] = params.presence_penalty
    return line

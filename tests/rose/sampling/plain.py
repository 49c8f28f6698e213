"""Sampling written once more, plainly and slowly: one row, float64 numpy, sets and sorts. Shares nothing with rose."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ipc.types import SamplingParams

Row = NDArray[np.float64]


def plain_logits(
    logits: Row, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> Row:
    """After logit_bias, min_tokens and penalties; -inf where min_tokens forbids."""
    logits = np.array(logits, np.float64)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        r = params.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token, count in Counter(output).items():
        logits[token] -= count * params.frequency_penalty + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            logits[token] = -np.inf
    return logits


def plain_softmax(logits: Row) -> Row:
    e = np.exp(logits - logits.max())
    return e / e.sum()


def plain_probabilities(logits: Row, params: SamplingParams) -> Row:
    """Of adjusted logits."""
    if params.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    p = plain_softmax(logits / params.temperature)
    keep = np.ones(len(p), bool)
    if params.top_k:
        keep &= logits >= np.sort(logits)[::-1][min(params.top_k, len(p)) - 1]
    keep &= p >= params.min_p * p.max()
    p = np.where(keep, p, 0)
    p /= p.sum()
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        last = p[order][before < max(params.top_p, 1e-12)][-1]
        p = np.where(p >= last, p, 0)
    return p / p.sum()


def plain_draw(p: Row, u: float) -> int:
    """The token at u of the cumulative distribution in the vocabulary's order."""
    return int(np.argmax(np.cumsum(p) > u))

"""Which attention backend serves a graph key or an eager step: a measured table, looked up by shape and size.

The choice follows from (head_dim, causal, number of sequences, number of tokens), never from single lengths, so that
every rank and every replay of a key agrees. bench/micro/attention.py measures the table (choice_table.py).

Not in the table, though faster by up to a fifth at 512 tokens a sequence: cuDNN. torch's public functions reach it for
sequences of one length only; lengths of a step are not known when its graph is captured.
"""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

from rose.attention.choice_table import TABLE
from rose.attention.interface import AttentionShape

BACKENDS = ("sdpa", "triton", "fa2", "fa3", "flash4")
# They read keys past a sequence's end and weigh them with 0: by themselves they let NaN of one sequence reach the one
# before it, so they run behind rose.attention.contained.
SPREADING = ("fa3", "flash4")


class Choice(NamedTuple):
    """The fastest backend where it was measured: N equal sequences, T tokens in all."""

    head_dim: int
    causal: bool
    num_seqs: int
    num_tokens: int
    backend: str


def choose(
    shape: AttentionShape,
    num_seqs: int,
    num_tokens: int,
    *,
    override: str | None = None,
    available: Sequence[str] = BACKENDS,
    table: Sequence[Choice] | None = None,
) -> str:
    """The backend for T = num_tokens over N = num_seqs sequences.

    The measured point nearest in (mean length, tokens), on a logarithmic scale, among backends that are available;
    of head dimensions that were not measured, the nearest stands in. `override` (from configuration) wins.
    Raises ValueError for an unknown or unavailable override.
    """
    if override is not None and override != "auto":
        if override not in available:
            raise ValueError(
                f"attention backend {override!r} is not available here: use auto or {', '.join(available)}"
            )
        return override
    rows = [row for row in (_TABLE if table is None else table) if row.backend in available]
    if not rows:
        return available[0]
    return min(rows, key=lambda row: _distance(row, shape, max(1, num_seqs), max(1, num_tokens))).backend


def _distance(row: Choice, shape: AttentionShape, num_seqs: int, num_tokens: int) -> tuple[float, bool, float]:
    head_dim = abs(log2(row.head_dim / shape.head_dim))
    mean_length = abs(log2(row.num_tokens / row.num_seqs) - log2(num_tokens / num_seqs))
    return head_dim, row.causal != shape.causal, mean_length + abs(log2(row.num_tokens / num_tokens))


_TABLE = tuple(Choice(*row) for row in TABLE)

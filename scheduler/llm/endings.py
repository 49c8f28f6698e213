"""Which of a step's tokens end their sequences: end-of-sequence ids, stop ids and length. Arrays in, arrays out.

Stop strings are the gateway's.
"""

from typing import NamedTuple

import numpy as np

from scheduler.llm.lanes import Flags, Ints, Lanes


class Endings(NamedTuple):
    """Of R rows. `taken` int64 [R]: tokens that count, the one that ends it included; both flags bool [R]."""

    taken: Ints
    ended: Flags
    stopped: Flags  # by a token; otherwise by length


def find_endings(rows: Ints, tokens: Ints, counts: Ints, lanes: Lanes, eos_token_ids: tuple[int, ...]) -> Endings:
    """`rows` int64 [R] lanes, `tokens` int64 [R, k+1] of which the first `counts` of each row are meant."""
    column = np.arange(tokens.shape[1])
    position = lanes.known[rows][:, None] + column  # tokens before each
    stops = np.zeros(tokens.shape, np.bool_)
    for token in eos_token_ids:
        stops |= tokens == token
    stops &= lanes.ends_on_eos[rows][:, None]
    for row in np.flatnonzero(lanes.has_stops[rows] & (counts > 0)).tolist():
        ids = lanes.at(int(rows[row])).stops
        stops[row] |= [token in ids for token in tokens[row].tolist()]
    stops &= position >= lanes.first_end[rows][:, None]
    ends = stops | (position + 1 >= lanes.limit[rows][:, None])
    ends &= column < counts[:, None]
    ended: Flags = np.logical_or.reduce(ends, axis=1)
    first = ends.argmax(1)
    taken = np.where(ended, first + 1, counts)
    stopped: Flags = stops[np.arange(len(rows)), first]
    return Endings(taken, ended, stopped & ended)

"""How many drafts pay at which number of sequences, from measured times between tokens.

A pair [most sequences, drafts] for every number of sequences that was measured, neighbours with the same drafts as one;
what makes less than MARGIN of a gain is not drafted. The last pair's number bounds what keeps the proposer's state.
"""

from collections.abc import Mapping

MARGIN = 1.03


def best_lengths(plain: Mapping[int, float], times: Mapping[tuple[int, int], float]) -> list[tuple[int, int]]:
    """`plain`: time between tokens without drafts by number of sequences; `times`: with them, by that and drafts."""
    table: list[tuple[int, int]] = []
    for batch in sorted({batch for batch, _ in times} & plain.keys()):
        candidates = {length: time for (size, length), time in times.items() if size == batch}
        best = min(candidates, key=lambda length: candidates[length])
        length = best if candidates[best] * MARGIN <= plain[batch] else 0
        if table and table[-1][1] == length:
            table.pop()
        table.append((batch, length))
    return table

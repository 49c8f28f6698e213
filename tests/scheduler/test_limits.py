"""The size of steps after one ran out of memory."""

from scheduler.limits import MemoryLimit


def test_it_halves_and_doubles_and_never_exceeds_the_most() -> None:
    limit = MemoryLimit(16, 1000)
    assert (limit.active, limit.num_seqs, limit.num_tokens) == (False, 16, 1000)
    limit.halve(10, 900)
    assert (limit.active, limit.num_seqs, limit.num_tokens) == (True, 5, 450)
    limit.halve(12, 100)  # another one, sent before: the smaller counts
    assert (limit.num_seqs, limit.num_tokens) == (5, 50)
    sizes = []
    while limit.active:
        limit.relax()
        sizes.append((limit.num_seqs, limit.num_tokens))
    assert sizes == [(10, 100), (16, 200), (16, 400), (16, 800), (16, 1000)]


def test_a_step_of_one_token_still_leaves_one() -> None:
    limit = MemoryLimit(16, 1000)
    limit.halve(1, 1)
    assert (limit.num_seqs, limit.num_tokens) == (1, 1)
    limit.lift()
    assert not limit.active

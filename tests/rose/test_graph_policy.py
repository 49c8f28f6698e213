"""Keys and decisions of the graph manager; no GPU."""

import random

import pytest

from rose.graph_policy import GraphKey, GraphPolicy, encode_shapes, padded_seqs, padded_tokens


def key(num_seqs: int = 1, num_tokens: int = 64, backend: str = "triton") -> GraphKey:
    return GraphKey("encode", num_seqs, num_tokens, 0, backend)


def modes(policy: GraphPolicy, keys: list[GraphKey]) -> list[str]:
    return [policy.decide(each).mode for each in keys]


@pytest.mark.parametrize(
    ("num_tokens", "padded"), [(1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 1280), (1281, 1536), (16384, 16384)]
)
def test_token_buckets(num_tokens: int, padded: int) -> None:
    assert padded_tokens(num_tokens) == padded


@pytest.mark.parametrize(("num_seqs", "padded"), [(1, 1), (2, 2), (3, 4), (33, 64), (65, 100), (100, 100)])
def test_sequence_buckets_end_at_the_most(num_seqs: int, padded: int) -> None:
    assert padded_seqs(num_seqs, 100) == padded


def test_the_shapes_are_those_that_steps_are_padded_to() -> None:
    shapes = encode_shapes(max_num_seqs=12, max_num_tokens=1536, max_model_len=500)
    assert len(shapes) == len(set(shapes))
    reachable = {
        (padded_seqs(seqs, 12), padded_tokens(tokens))
        for seqs in range(1, 13)
        for tokens in range(seqs, min(seqs * 500, 1536) + 1)
    }
    assert set(shapes) == reachable


def test_first_sight_is_eager_the_second_captures_then_replays() -> None:
    policy = GraphPolicy("lazy", max_graphs=8, max_tokens=4096)
    assert modes(policy, [key()] * 4) == ["eager", "capture", "replay", "replay"]
    assert modes(policy, [key(2), key(), key(2), key(2)]) == ["eager", "replay", "capture", "replay"]


def test_backends_have_graphs_of_their_own() -> None:
    policy = GraphPolicy("lazy", max_graphs=8, max_tokens=4096)
    assert modes(policy, [key(), key(backend="fa3"), key(), key(backend="fa3")]) == ["eager", "eager"] + ["capture"] * 2


def test_large_steps_and_off_stay_eager() -> None:
    assert modes(GraphPolicy("lazy", max_graphs=8, max_tokens=4096), [key(1, 4352)] * 3) == ["eager"] * 3
    assert modes(GraphPolicy("lazy", max_graphs=8, max_tokens=4096), [key(backend="sdpa")] * 3) == ["eager"] * 3
    assert modes(GraphPolicy("off", max_graphs=8, max_tokens=4096), [key()] * 3) == ["eager"] * 3


def test_the_least_recently_used_graph_leaves_and_comes_back_with_one_capture() -> None:
    policy = GraphPolicy("lazy", max_graphs=2, max_tokens=4096)
    a, b, c = key(1), key(2), key(4)
    modes(policy, [a, a, b, b, a])
    assert policy.decide(c).mode == "eager"
    decision = policy.decide(c)
    assert (decision.mode, decision.evicted) == ("capture", b)
    assert policy.captured == [a, c]
    assert policy.decide(b) == ("capture", a)


def test_listed_shapes_are_captured_by_idle_steps() -> None:
    known = [key(1), key(2), key(1, 1 << 20)]
    policy = GraphPolicy("list", max_graphs=8, max_tokens=4096, known=known)
    assert policy.num_waiting == 2  # one is over the crossover
    assert modes(policy, [key(1), key(1)]) == ["eager", "capture"]  # traffic comes before idleness
    assert policy.next_idle() == key(2)
    assert policy.next_idle() is None
    assert modes(policy, [key(2)]) == ["replay"]


def test_idle_captures_evict_nothing() -> None:
    policy = GraphPolicy("list", max_graphs=2, max_tokens=4096, known=[key(4), key(8), key(16)])
    modes(policy, [key(1), key(1)])
    assert policy.next_idle() == key(4)
    assert policy.next_idle() is None
    assert set(policy.captured) == {key(1), key(4)}


def test_what_idle_steps_run_does_not_depend_on_failed_captures() -> None:
    """It must be the same on every rank, and only some have failed."""
    ranks = [GraphPolicy("list", max_graphs=3, max_tokens=4096, known=[key(1), key(2), key(4)]) for _ in range(2)]
    for rank, policy in enumerate(ranks):
        modes(policy, [key(1), key(1)])
        if rank:
            policy.failed(key(1))
    told = [[policy.next_idle() for _ in range(3)] for policy in ranks]
    assert told == [[key(2), key(4), None]] * 2


def test_lazy_and_off_ignore_the_list() -> None:
    for capture in ("lazy", "off"):
        assert GraphPolicy(capture, max_graphs=2, max_tokens=4096, known=[key()]).next_idle() is None


def test_a_failed_capture_is_tried_again_at_the_next_sight() -> None:
    policy = GraphPolicy("lazy", max_graphs=2, max_tokens=4096)
    modes(policy, [key(), key()])
    policy.failed(key())
    assert policy.captured == []
    assert modes(policy, [key(), key()]) == ["capture", "replay"]


def test_a_capture_that_goes_on_failing_is_tried_ever_less_often() -> None:
    policy = GraphPolicy("lazy", max_graphs=2, max_tokens=4096)
    tries = []
    for sight in range(40):
        if policy.decide(key()).mode == "capture":
            tries.append(sight)
            policy.failed(key())
    assert tries == [1, 2, 5, 12, 27]
    assert modes(policy, [key(2), key(2)]) == ["eager", "capture"]  # another shape knows nothing of it


def test_two_ranks_decide_the_same_and_never_hold_too_many() -> None:
    choose = random.Random(5)
    keys = [key(choose.choice([1, 2, 4]), choose.choice([64, 128, 192, 256])) for _ in range(500)]
    first, second = (GraphPolicy("lazy", max_graphs=3, max_tokens=192) for _ in range(2))
    held: set[GraphKey] = set()
    for each in keys:
        decision = first.decide(each)
        assert decision == second.decide(each)
        if decision.evicted:
            held.remove(decision.evicted)
        if decision.mode == "capture":
            held.add(each)
        assert (decision.mode == "replay") <= (each in held)
        assert held == set(first.captured)
        assert len(held) <= 3

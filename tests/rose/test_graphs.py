"""Captures that find no memory, and what is prepared for them: no model, no device."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from torch import Tensor

from rose.attention.interface import AttentionShape
from rose.graph_policy import GraphKey, GraphPolicy
from rose.graphs import GraphManager
from tests.rose.host_stream import HostStream

KEY = GraphKey("encode", 1, 64, 0, "triton")


class Attention:
    """Of a graph, or of one step."""

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        self.prepared = cu_seqlens_host

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        raise AssertionError("no model runs here")


class Memory:
    """`is_full`: the largest step needs all that is left."""

    def __init__(self, *, is_full: bool) -> None:
        self.is_full = is_full
        self.num_captures = 0
        self.evicted_keys: list[GraphKey] = []

    def has_room(self) -> bool:
        return not self.is_full

    @contextlib.contextmanager
    def capturing(self, key: GraphKey) -> Iterator[None]:
        self.num_captures += 1
        yield

    def evicted(self, key: GraphKey) -> None:
        self.evicted_keys.append(key)


def manager(memory: Memory, *, capture: str = "lazy", known: tuple[GraphKey, ...] = ()) -> SimpleNamespace:
    """`graphs` over a device with `memory`; what was made for graphs; with what attention each step ran; the keys whose
    steps have left something."""
    made = SimpleNamespace(stream=HostStream(), for_graphs=[], ran=[], left=set())

    def attention(key: GraphKey) -> Attention:
        made.for_graphs.append(Attention())
        return made.for_graphs[-1]

    def forward(key: GraphKey, attend: Attention) -> None:
        made.ran.append(attend)
        made.left.add(key)

    made.graphs = GraphManager(
        GraphPolicy(capture, max_graphs=4, max_tokens=4096, known=known),
        made.stream,
        attention=attention,
        attend_once=lambda key, offsets: Attention(),
        forward=forward,
        free_bytes=lambda: 0,
        on_capture=lambda: None,
        memory=memory,
        forget=made.left.discard,
    )
    return made


def test_without_room_beside_the_largest_step_nothing_is_prepared() -> None:
    memory = Memory(is_full=True)
    made = manager(memory)
    for _ in range(3):
        made.graphs.run(KEY, [0, 60])
    assert (len(made.ran), made.for_graphs, made.stream.num_captures) == (3, [], 0)
    assert made.graphs.counters.eager == 3
    memory.is_full = False
    for _ in range(8):
        made.graphs.run(KEY, [0, 60])
    assert len(made.for_graphs) == made.stream.num_captures == memory.num_captures == made.graphs.num_graphs == 1
    assert made.ran[-1] is made.for_graphs[0]
    assert made.for_graphs[0].prepared == [0, 60]
    assert made.graphs.counters.replays > 1


def test_every_capture_is_within_the_bound_and_a_failed_one_runs_eagerly() -> None:
    memory = Memory(is_full=False)
    made = manager(memory)
    made.graphs.run(KEY, [0, 60])
    made.stream.out_of_memory = True
    made.graphs.run(KEY, [0, 60])
    assert (memory.num_captures, made.graphs.num_graphs, made.graphs.counters.eager, len(made.ran)) == (1, 0, 2, 2)
    made.graphs.run(KEY, [0, 60])
    assert (memory.num_captures, made.graphs.num_graphs, made.graphs.counters.replays) == (2, 1, 1)


def test_listed_shapes_without_room_run_and_stay_without_a_graph() -> None:
    """Other ranks may have room, and then wait for this one's part of the step."""
    made = manager(Memory(is_full=True), capture="list", known=(KEY, KEY._replace(num_seqs=2)))
    assert made.graphs.num_waiting == 2
    while made.graphs.capture_listed(lambda key: [0, 64]):
        pass
    assert (made.graphs.num_waiting, made.stream.num_captures, made.for_graphs, len(made.ran)) == (0, 0, [], 2)


def test_what_steps_leave_goes_with_their_graph() -> None:
    """The five keys of four graphs; whose capture fails; listed ones with and without room."""
    memory = Memory(is_full=False)
    made = manager(memory)
    keys = [KEY._replace(num_seqs=n) for n in range(1, 6)]
    for key in keys:
        made.graphs.run(key, [0, 60])
        made.left.discard(key)  # as whoever takes up an eager step does
        made.graphs.run(key, [0, 60])
    assert made.left == set(made.graphs.keys) == set(keys[1:])
    assert memory.evicted_keys == keys[:1]
    made.stream.out_of_memory = True
    made.graphs.run(keys[0], [0, 60])
    made.left.discard(keys[0])
    assert made.left == set(made.graphs.keys) == set(keys[2:])


@pytest.mark.parametrize("is_full", [False, True])
def test_what_listed_shapes_leave_goes_if_their_capture_fails(is_full: bool) -> None:
    made = manager(Memory(is_full=is_full), capture="list", known=(KEY, KEY._replace(num_seqs=2)))
    made.stream.out_of_memory = True
    while made.graphs.capture_listed(lambda key: [0, 64]):
        pass
    assert not made.left, "a capture runs nothing here"
    for key in made.graphs.keys:
        made.graphs.run(key, [0, 64])
    assert made.left == set(made.graphs.keys) == (set() if is_full else {KEY._replace(num_seqs=2)})

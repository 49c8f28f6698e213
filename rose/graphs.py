"""The captured graphs of one model: which there are, running a step through them, and what they cost.

Which step is captured or replayed is rose.graph_policy's to say; what a step computes is the caller's `forward`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rose.attention.interface import Attend
from rose.attention.static import StaticAttention
from rose.cuda_stream import Graph, StepStream
from rose.graph_memory import GraphMemory, UnboundedMemory
from rose.graph_policy import GraphKey, GraphPolicy

MAX_WARM = 16  # shapes seen once that keep their attention for the capture to come


@dataclass(slots=True)
class GraphCounters:
    """Since the start of this process."""

    replays: int = 0
    captures: int = 0
    eager: int = 0
    evictions: int = 0
    capture_seconds: float = 0.0
    longest_capture_seconds: float = 0.0
    memory_bytes: int = 0  # that captures took from the device


class GraphManager:
    """`attention` makes what a key's steps plan and call, `attend_once` the same for one step of a key that never has
    a graph; `forward` enqueues a step on the static buffers. `free_bytes` tells how much device memory is left.
    `memory` bounds what graphs take of it. `on_capture` is called after each capture. `forget` drops what steps of a
    key, which has no graph then, have left on the device.
    """

    def __init__(
        self,
        policy: GraphPolicy,
        stream: StepStream,
        *,
        attention: Callable[[GraphKey], StaticAttention],
        attend_once: Callable[[GraphKey, list[int]], Attend],
        forward: Callable[[GraphKey, Attend], None],
        free_bytes: Callable[[], int],
        on_capture: Callable[[], None],
        memory: GraphMemory | None = None,
        forget: Callable[[GraphKey], None] = lambda key: None,
    ) -> None:
        self.counters = GraphCounters()
        self._policy = policy
        self._stream = stream
        self._make_attention = attention
        self._attend_once = attend_once
        self._forward = forward
        self._free_bytes = free_bytes
        self._on_capture = on_capture
        self._memory = memory or UnboundedMemory()
        self._forget = forget
        self._attention: dict[GraphKey, StaticAttention] = {}
        self._graphs: dict[GraphKey, Graph] = {}

    def run(self, key: GraphKey, cu_seqlens_host: list[int]) -> None:
        """Enqueues one step whose inputs are in the static buffers. Raises torch.OutOfMemoryError."""
        if not self._policy.may_capture(key):
            return self._run_once(key, cu_seqlens_host)
        mode, evicted = self._policy.decide(key)
        if evicted is not None:
            self._evict(evicted)
        attention = self._attention.get(key) or self._prepared_for(key)
        if attention is None:
            if mode == "capture":
                self._policy.failed(key)
            return self._run_once(key, cu_seqlens_host)
        attention.prepare(cu_seqlens_host)
        if mode == "capture":
            self._capture(key, attention)
            attention.prepare(cu_seqlens_host)
        graph = self._graphs.get(key)
        if graph is None:
            self.counters.eager += 1
            return self._forward(key, attention)
        self.counters.replays += 1
        return graph.replay()

    def capture_listed(self, fill: Callable[[GraphKey], list[int]]) -> bool:
        """Runs and captures one listed shape on inputs of `fill`'s, which tells their offsets; False if none is left.

        Raises torch.OutOfMemoryError.
        """
        key = self._policy.next_idle()
        if key is None:
            return False
        attention = self._prepared_for(key)
        if attention is None:
            self._policy.failed(key)
            self._run_once(key, fill(key))  # other ranks may have room: they wait for this one's part of the step
            self._forget(key)
            return True
        attention.prepare(fill(key))
        self._forward(key, attention)
        self._forget(key)
        self._capture(key, attention)
        return True

    def graph(self, key: GraphKey) -> Graph | None:
        """What a replay of `key` launches, for measurements."""
        return self._graphs.get(key)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def keys(self) -> list[GraphKey]:
        """Those with a graph, least recently used first."""
        return self._policy.captured

    @property
    def num_waiting(self) -> int:
        """Listed shapes that idle steps may still capture."""
        return self._policy.num_waiting

    def figures(self) -> dict[str, float]:
        """As rose.runner.Runner's."""
        counters = self.counters
        return {
            "graph_replays_total": counters.replays,
            "graph_captures_total": counters.captures,
            "graph_evictions_total": counters.evictions,
            "graph_capture_seconds_total": counters.capture_seconds,
            "graph_longest_capture_seconds": counters.longest_capture_seconds,
            "graph_memory_bytes": counters.memory_bytes,
            "graphs": self.num_graphs,
            "graphs_waiting": self.num_waiting,
            "eager_steps_total": counters.eager,
        }

    def _run_once(self, key: GraphKey, cu_seqlens_host: list[int]) -> None:
        self.counters.eager += 1
        self._forward(key, self._attend_once(key, cu_seqlens_host))

    def _prepared_for(self, key: GraphKey) -> StaticAttention | None:
        """The key's attention, made anew; that of old shapes without a graph is forgotten. None: no room for it."""
        warm = [each for each in self._attention if each not in self._graphs]
        for each in warm[: max(0, len(warm) - MAX_WARM + 1)]:
            del self._attention[each]
        if not self._memory.has_room():
            return None
        made = self._attention[key] = self._make_attention(key)
        return made

    def _capture(self, key: GraphKey, attention: StaticAttention) -> None:
        """Out of memory: the shape stays without a graph for now."""
        started, free = time.perf_counter(), self._free_bytes()
        attention.prepare([0] + [key.num_tokens] * key.num_seqs)
        try:
            with self._memory.capturing(key):
                graph = self._stream.capture(lambda: self._forward(key, attention))
        except torch.OutOfMemoryError:
            self._policy.failed(key)
            self._forget(key)
            return
        self._graphs[key] = graph
        seconds, counters = time.perf_counter() - started, self.counters
        counters.captures += 1
        counters.capture_seconds += seconds
        counters.longest_capture_seconds = max(counters.longest_capture_seconds, seconds)
        counters.memory_bytes += max(0, free - self._free_bytes())
        self._on_capture()

    def _evict(self, key: GraphKey) -> None:
        """The graph may be running still: a capture follows, so there is time to wait for it."""
        self._stream.drain()
        self.counters.evictions += 1
        self._graphs.pop(key, None)
        self._attention.pop(key, None)
        self._forget(key)
        self._memory.evicted(key)

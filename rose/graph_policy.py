"""Which steps run as CUDA graphs, and under which key. Pure: no tensors, no clock, no device.

Every rank of a replica sees the same plans in the same order and so decides the same without a word. A graph belongs
to a padded shape: sequence counts go up to powers of two with empty sequences, token counts to multiples of 64
(small) or 256 (large), and any step under the same key is served by the same graph, whatever its lengths.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

Capture = Literal["lazy", "list", "eager", "off"]
Mode = Literal["eager", "capture", "replay"]

SMALL_TOKENS = 1024  # up to here in steps of 64, above in steps of 256
SMALL_STEP, LARGE_STEP = 64, 256
HOST_BACKENDS = ("sdpa",)  # attention whose launches depend on lengths: a graph would keep one step's
MAX_SEEN = 4096  # shapes remembered that have no graph (yet)
MAX_WAIT = 1024  # sights between two captures that fail


class GraphKey(NamedTuple):
    """Everything a graph is fixed to. `q`: tokens a sequence of decode and verify; 0 where lengths are ragged."""

    kind: Literal["encode", "decode", "verify"]
    num_seqs: int
    num_tokens: int
    q: int
    backend: str  # of attention


class Decision(NamedTuple):
    """How a step runs; `evicted` is the graph that has to go first."""

    mode: Mode
    evicted: GraphKey | None = None


def padded_seqs(num_seqs: int, most: int) -> int:
    """The next power of two, but not over `most`."""
    return min(1 << (num_seqs - 1).bit_length(), most)


def padded_tokens(num_tokens: int) -> int:
    step = SMALL_STEP if num_tokens <= SMALL_TOKENS else LARGE_STEP
    return -(-num_tokens // step) * step


def encode_shapes(max_num_seqs: int, max_num_tokens: int, max_model_len: int) -> list[tuple[int, int]]:
    """Every (num_seqs, num_tokens) that steps up to these sizes can be padded to, smallest first."""
    seqs = sorted({padded_seqs(n, max_num_seqs) for n in range(1, max_num_seqs + 1)})
    tokens = [n for n in range(SMALL_STEP, max_num_tokens + 1, SMALL_STEP) if padded_tokens(n) == n]
    # half the sequences of a bucket, and one more, have a token each at least
    return [(s, t) for t in tokens for s in seqs if s // 2 < t <= padded_tokens(s * max_model_len)]


class GraphPolicy:
    """Decides for one step after the other; count-bounded, least recently used first.

    lazy: a shape's first sight runs eagerly (kernels compile, libraries allocate), its second is captured, later ones
    replay. list: the same, and shapes known from earlier runs are captured by idle steps. eager: like list, but all
    before the first step. off: nothing is captured. Steps over `max_tokens` always run eagerly: there the GPU takes
    longer than the launches.
    """

    def __init__(self, capture: Capture, *, max_graphs: int, max_tokens: int, known: Iterable[GraphKey] = ()) -> None:
        self._max_graphs = 0 if capture == "off" else max_graphs
        self._max_tokens = max_tokens
        self._graphs: OrderedDict[GraphKey, None] = OrderedDict()  # captured, least recently used first
        self._seen: OrderedDict[GraphKey, int] = OrderedDict()  # without a graph: sights until it is captured
        self._tried: set[GraphKey] = set()  # had a graph once, or a capture that failed: the same on every rank
        self._waits: dict[GraphKey, int] = {}  # how many there were after the last capture that failed
        listed = known if capture in ("list", "eager") else ()
        self._waiting = deque([key for key in listed if self.may_capture(key)][: self._max_graphs])

    def decide(self, key: GraphKey) -> Decision:
        """How the step about to be launched runs; remembers that it did."""
        if not self.may_capture(key):
            return Decision("eager")
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return Decision("replay")
        wait = self._seen.get(key, 1)
        if wait > 0:
            self._see(key, wait - 1)
            return Decision("eager")
        return Decision("capture", self._add(key))

    def next_idle(self) -> GraphKey | None:
        """A listed shape that an idle step shall run and capture; None when none is left. Evicts nothing.

        Does not depend on which captures have failed: the step runs, and ranks must run the same.
        """
        while self._waiting and len(self._tried) < self._max_graphs:
            key = self._waiting.popleft()
            if key not in self._tried:
                self._add(key)
                return key
        self._waiting.clear()
        return None

    def failed(self, key: GraphKey) -> None:
        """The capture did not fit into memory: it is tried again at the next sight, then at ever fewer of them, as a
        try costs as much as the step."""
        self._graphs.pop(key, None)
        wait = self._waits[key] = min(2 * self._waits.get(key, -1) + 2, MAX_WAIT)
        self._see(key, wait)

    def may_capture(self, key: GraphKey) -> bool:
        return self._max_graphs > 0 and key.num_tokens <= self._max_tokens and key.backend not in HOST_BACKENDS

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def captured(self) -> list[GraphKey]:
        """Least recently used first."""
        return list(self._graphs)

    def _add(self, key: GraphKey) -> GraphKey | None:
        """Counts `key` as captured; returns the graph that leaves for it."""
        evicted = None
        if len(self._graphs) >= self._max_graphs:
            evicted, _ = self._graphs.popitem(last=False)
            self._see(evicted)  # its next sight captures again: kernels are warm
        self._seen.pop(key, None)
        self._graphs[key] = None
        self._tried.add(key)
        return evicted

    def _see(self, key: GraphKey, wait: int = 0) -> None:
        self._seen[key] = wait
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

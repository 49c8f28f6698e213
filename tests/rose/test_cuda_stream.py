"""What of a CUDA stream needs no device: the order of things around a capture."""

import gc
from collections.abc import Iterator

import pytest
import torch

from rose.cuda_stream import CudaStream


class Cycle:
    """Freed by a collection alone; stands for an old graph, an event or page-locked memory."""

    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cycle.freed += 1


class FakeGraph:
    """Tells how many cycles were freed between its beginning and its end."""

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._before = Cycle.freed

    def capture_end(self) -> None:
        self.num_freed = Cycle.freed - self._before


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> CudaStream:
    """One that has no device behind it: only `capture` works."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    made = object.__new__(CudaStream)
    made._pool = (0, 1)
    return made


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def make_cycles() -> None:
    for _ in range(200):
        Cycle()


def test_no_cycle_is_freed_during_a_capture(stream: CudaStream) -> None:
    before = Cycle.freed
    make_cycles()
    assert Cycle.freed > before  # a collection does come of so many
    graph = stream.capture(make_cycles)
    assert graph.num_freed == 0
    assert gc.isenabled()
    make_cycles()
    assert Cycle.freed > before + 200  # what was left during the capture, too


def test_collection_is_left_as_it_was(stream: CudaStream) -> None:
    gc.disable()
    stream.capture(make_cycles)
    assert not gc.isenabled()


def test_a_capture_that_fails_leaves_collection_on(stream: CudaStream) -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        stream.capture(work)
    assert gc.isenabled()

"""What graphs may take, on an allocator that exists in numbers alone; the real one: test_gpu_encoder.py."""

import pytest
import torch

from rose.graph_memory import CudaGraphMemory, UnboundedMemory
from rose.graph_policy import GraphKey

KEY = GraphKey("decode", 4, 4, 1, "triton+forward")
MIB = 1 << 20
TOTAL = 1000 * MIB


class Device:
    """torch.cuda's figures. `take` reserves as the allocator does: up to the process's limit, and what is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction, self.allocated, self.reserved, self.others = 0.9, 100 * MIB, 100 * MIB, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (TOTAL - self.others - self.reserved, TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self._limit)

    def _limit(self, fraction: float) -> None:
        assert 0 <= fraction <= 1
        self.fraction = fraction

    def take(self, num_bytes: int) -> None:
        for _ in range(0, num_bytes, MIB):
            if self.reserved + MIB > min(self.fraction * TOTAL, TOTAL - self.others):
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.reserved += MIB


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def capture(memory: CudaGraphMemory, device: Device, num_bytes: int, kept_bytes: int = 0) -> None:
    """`kept_bytes` of them stay in use."""
    with memory.capturing(KEY):
        device.take(num_bytes)
        device.allocated += kept_bytes


def test_captures_take_what_the_largest_step_does_not_need(device: Device) -> None:
    memory = CudaGraphMemory(400 * MIB)  # 450 with slack: of 900, 100 are weights and 350 are left
    capture(memory, device, 349 * MIB)
    assert device.fraction == 0.9
    with pytest.raises(torch.OutOfMemoryError):
        capture(memory, device, 2 * MIB)
    assert device.fraction == 0.9
    assert 0.9 * TOTAL - device.reserved >= 450 * MIB


def test_what_a_failed_capture_took_is_lost_too(device: Device) -> None:
    memory = CudaGraphMemory(400 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        capture(memory, device, 800 * MIB)
    assert device.reserved == 450 * MIB
    assert memory.has_room()  # to the byte
    device.allocated += MIB
    assert not memory.has_room()
    with pytest.raises(torch.OutOfMemoryError):
        capture(memory, device, MIB)


def test_what_steps_have_reserved_and_given_back_is_theirs(device: Device) -> None:
    """A capture cannot use it, so it need not be left a second time."""
    memory = CudaGraphMemory(400 * MIB)
    device.take(450 * MIB)
    capture(memory, device, 349 * MIB)
    assert device.reserved == 899 * MIB


def test_what_a_graph_keeps_is_taken_once(device: Device) -> None:
    """Nor is it there for steps when the graph has gone: its pool has it back."""
    memory = CudaGraphMemory(400 * MIB)
    capture(memory, device, 350 * MIB, kept_bytes=50 * MIB)
    assert memory.has_room()  # to the byte
    memory.evicted(KEY)
    device.allocated -= 50 * MIB
    assert memory.has_room()
    device.allocated += MIB
    assert not memory.has_room()


def test_what_other_processes_have_is_not_there(device: Device) -> None:
    memory = CudaGraphMemory(400 * MIB)
    device.others = 400 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        capture(memory, device, 51 * MIB)
    device.others = 500 * MIB
    assert not memory.has_room()


def test_hosts_are_unbounded() -> None:
    memory = UnboundedMemory()
    assert memory.has_room()
    with memory.capturing(KEY):
        pass
    memory.evicted(KEY)
    assert memory.has_room()

"""Which sums go over shared memory, and how; the kernels themselves need GPUs (test_gpu_ranks)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rose.distributed import nccl, shared_sums
from rose.distributed.shared_sums import SharedSums, Ways, memory_to_share, way

WAYS = Ways(one_shot=1024, two_shot=4096)
OTHERS = 3.0  # what the other ranks add


class Operators:
    """The sums of a rank whose neighbours hold `OTHERS` everywhere. A two-shot one leaves its room overwritten."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def one_shot_all_reduce_out(self, room: Tensor, operation: str, group_name: str, out: Tensor) -> Tensor:
        self.calls.append(("one_shot", room.data_ptr()))
        return torch.add(room, OTHERS, out=out)

    def two_shot_all_reduce_out(self, room: Tensor, operation: str, group_name: str, out: Tensor) -> Tensor:
        self.calls.append(("two_shot", room.data_ptr()))
        torch.add(room, OTHERS, out=out)
        room.fill_(-1)
        return out


class Group:
    group_name = "0"


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    class Memory:
        @staticmethod
        def empty_strided_p2p(
            size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device, _: str
        ) -> Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    made = Operators()
    monkeypatch.setattr(shared_sums, "_Memory", Memory)
    monkeypatch.setattr(shared_sums.symmetric_memory, "rendezvous", lambda memory, group: None)
    monkeypatch.setattr(torch.ops, "symm_mem", made)
    return made


def test_no_rank_waits_for_one_that_has_no_memory_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has some; another has none, and does not come to where memory is mapped."""
    made: list[Any] = []
    world = SimpleNamespace(WORLD=Group())
    others = SimpleNamespace(group=world, ReduceOp=dist.ReduceOp, all_reduce=lambda able, operation: able.zero_())
    monkeypatch.setattr(nccl, "dist", others)
    monkeypatch.setattr(nccl, "memory_to_share", lambda group, device, ways: torch.zeros(4))
    monkeypatch.setattr(nccl, "SharedSums", lambda *args: made.append(args))
    rank: Any = SimpleNamespace(rank=0)
    with pytest.warns(RuntimeWarning, match="another rank cannot map memory of this one"):
        assert nccl.NcclGroup._share(rank, torch.device("cpu"), WAYS) is None
    assert not made


def sums() -> SharedSums:
    group: Any = Group()
    return SharedSums(group, memory_to_share(group, torch.device("cpu"), WAYS), WAYS)


@pytest.mark.parametrize(
    ("num_bytes", "dtype", "expected"),
    [
        (16, torch.bfloat16, "one_shot"),
        (1024, torch.float32, "one_shot"),
        (1040, torch.bfloat16, "two_shot"),
        (4096, torch.float32, "two_shot"),
        (4112, torch.float32, None),
        (24, torch.bfloat16, None),  # no whole number of reads
        (64, torch.float16, None),
        (64, torch.int32, None),
        (0, torch.float32, None),
    ],
)
def test_size_and_dtype_decide(num_bytes: int, dtype: torch.dtype, expected: str | None) -> None:
    assert way(num_bytes, dtype, WAYS) == expected


@pytest.mark.parametrize(("num_rows", "name"), [(2, "one_shot"), (20, "two_shot")])
def test_a_tensor_made_in_the_room_is_not_copied(operators: Operators, num_rows: int, name: str) -> None:
    made = sums()
    room = made.room((num_rows, 48), torch.float32)
    assert room is not None
    elsewhere = torch.full((num_rows, 48), 2.0)
    for x in (room.fill_(2.0), elsewhere):
        total = made.sum(x)
        assert total is not None
        assert total.data_ptr() not in (x.data_ptr(), room.data_ptr())  # the next sum must not overwrite it
        assert (total == 5.0).all()
    assert operators.calls == [(name, room.data_ptr())] * 2
    assert (elsewhere == 2.0).all()


def test_what_does_not_fit_is_left_to_nccl(operators: Operators) -> None:
    made = sums()
    assert made.room((100, 48), torch.float32) is None
    assert made.sum(torch.ones(100, 48)) is None
    assert made.sum(torch.ones(4, 4, dtype=torch.float16)) is None
    assert not operators.calls

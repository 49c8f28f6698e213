"""What launches follow from, where no GPU is needed to know it."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from rose.kernels import launch
from rose.kernels.launch import stages_that_fit


@pytest.mark.parametrize(
    ("shared", "wanted", "other", "found"),
    [(232_448, 4, 0, 4), (232_448, 4, 40_000, 4), (101_376, 4, 0, 2), (101_376, 4, 40_000, 1), (20_000, 4, 0, 1)],
)
def test_stages_are_as_many_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, shared: int, wanted: int, other: int, found: int
) -> None:
    """Of an H200, of a GPU with 99 KiB for a multiprocessor, and never none."""
    monkeypatch.setattr(launch, "_shared_bytes", lambda device: shared)
    on_gpu = cast(Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)))
    assert stages_that_fit(wanted, 48_000, on_gpu, other) == found
    assert stages_that_fit(wanted, 48_000, torch.empty(1), other) == wanted

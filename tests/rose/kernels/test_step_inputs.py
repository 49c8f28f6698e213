"""Positions, types and status made on the device against numpy."""

import numpy as np
import pytest
import torch

from ipc.step import ROW_STATUS, ROW_TYPE_START
from rose.kernels.step_inputs import step_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("lengths", "num_seqs", "num_tokens"),
    [([5], 1, 64), ([1, 7, 130, 2], 4, 192), ([40, 24], 2, 64), ([3] * 5, 8, 64), ([1] * 140, 256, 192)],
)
def test_step_inputs(lengths: list[int], num_seqs: int, num_tokens: int) -> None:
    random = np.random.default_rng(0)
    rows = random.integers(-1, 9, (num_seqs, 8)).astype(np.int32)
    rows[:, ROW_STATUS] = random.integers(-1, 3, num_seqs)
    cu_seqlens = np.full(num_seqs + 1, sum(lengths), np.int32)
    cu_seqlens[: len(lengths) + 1] = np.cumsum([0, *lengths])
    positions, types = (torch.full((num_tokens,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    status = torch.full((num_seqs,), -7, dtype=torch.int32, device=DEVICE)
    step_inputs(torch.from_numpy(rows).to(DEVICE), torch.from_numpy(cu_seqlens).to(DEVICE), positions, types, status)
    padding = [0] * (num_tokens - sum(lengths))
    assert positions.tolist() == [p for n in lengths for p in range(n)] + padding
    begins = rows[: len(lengths), ROW_TYPE_START].tolist()
    expected = [int(0 <= begin <= p) for n, begin in zip(lengths, begins, strict=True) for p in range(n)]
    assert types.tolist() == expected + padding
    assert status.tolist() == np.maximum(rows[:, ROW_STATUS], 0).tolist()

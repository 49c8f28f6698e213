"""Block tables without gaps: each row's blocks in order, and nothing behind them touched."""

import torch

from rose.kernels.flat_table import flat_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_flat_table() -> None:
    lengths, block_size = [33, 0, 1, 16, 17, 0], 16
    table = torch.arange(6 * 4, dtype=torch.int32, device=DEVICE).view(6, 4) + 100
    indptr, indices, last = (torch.full((n,), -7, dtype=torch.int32, device=DEVICE) for n in (7, 24, 6))
    flat_table(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), table, block_size, indptr, indices, last)
    assert indptr.tolist() == [0, 3, 3, 4, 5, 7, 7]
    assert indices.tolist() == [100, 101, 102, 108, 112, 116, 117] + [-7] * 17
    assert last.tolist() == [1, 16, 1, 16, 1, 16]

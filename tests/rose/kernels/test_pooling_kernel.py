"""Pooling and conversion in one launch, row by row against rose/pooling.py."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ipc.step import DTYPE_CODES, POOLING_CODES, STATUS_BAD_TOKEN, STATUS_NON_FINITE, STATUS_OK
from rose.attention.interface import Sequences
from rose.kernels.pooling import Defaults, _tile_tokens, convert_rows, pool_rows, pool_vectors
from rose.pooling import OutputDefaults, convert, group_rows, pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 44  # not a power of two, not a multiple of 8
STRIDE = 4 * HIDDEN
UNTOUCHED = 0xA5
KINDS = [  # pooling, dtype, dimensions, normalize
    ("mean", "float32", -1, -1),
    ("cls", "float32", 13, 1),
    ("last_token", "int8", -1, 0),
    ("mean", "int8", 20, 1),
    (None, "binary", 44, -1),
    ("last_token", "binary", 13, 1),
    (None, "float32", -1, 0),
]


def make_table(kinds: list[tuple[str | None, str, int, int]]) -> Tensor:
    lines = [
        [-1, -1 if pooling is None else POOLING_CODES[pooling], DTYPE_CODES[dtype], dimensions, normalize, row * STRIDE]
        for row, (pooling, dtype, dimensions, normalize) in enumerate(kinds)
    ]
    table = torch.full((len(lines), 8), -1, dtype=torch.int32)
    table[:, :6] = torch.tensor(lines)
    return table


def expected_rows(hidden: Tensor, lengths: list[int], table: Tensor, defaults: OutputDefaults) -> dict[int, Tensor]:
    """Each non-empty row's bytes by the reference."""
    offsets = [0, *np.cumsum(lengths).tolist()]
    sequences = Sequences(offsets, torch.tensor(offsets, dtype=torch.int32))
    rows = {}
    for row, length in enumerate(lengths):
        if length:
            (group,) = group_rows(table[row : row + 1].numpy(), defaults)
            one = Sequences([0, length], torch.tensor([0, length], dtype=torch.int32))
            vectors = pool(hidden[sequences.cu_seqlens_host[row] :][:length].cpu(), one, group.pooling)
            rows[row] = convert(vectors, group, defaults.int8)[0]
    return rows


def check(values: Tensor, row: int, want: Tensor, dtype: str) -> None:
    got = values[row * STRIDE :][: len(want)].cpu()
    if dtype == "float32":
        torch.testing.assert_close(got.view(torch.float32), want.view(torch.float32), atol=1e-5, rtol=1e-5)
    elif dtype == "int8":
        assert (got.view(torch.int8).int() - want.view(torch.int8).int()).abs().max() <= 1
    else:
        assert torch.equal(got, want)
    assert (values[row * STRIDE + len(want) : (row + 1) * STRIDE] == UNTOUCHED).all(), "wrote past its row"


@pytest.mark.parametrize("int8", ["tanh", "scaled"])
@pytest.mark.parametrize(("longest", "pad"), [(12, 1), (130, 120), (1900, 200)])  # in one go, tiles of 32, of 128
def test_pool_rows(longest: int, pad: int, int8: str) -> None:
    lengths = [5, 1, 3, longest, 0, 3, 64 if longest > 12 else 5, 0]
    kinds = [*KINDS[:4], KINDS[4], *KINDS[5:], KINDS[0]]
    hidden = torch.randn(sum(lengths) + pad, HIDDEN, device=DEVICE)
    hidden[sum(lengths) :] = float("nan")
    table = make_table(kinds)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)
    status = torch.full((len(lengths),), STATUS_OK, dtype=torch.int32, device=DEVICE)
    status[4] = 77
    values = torch.full((STRIDE * len(lengths),), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    pool_rows(hidden, cu_seqlens, table.to(DEVICE), status, values, Defaults("mean", True, int8 == "tanh"))
    for row, want in expected_rows(hidden, lengths, table, OutputDefaults("mean", HIDDEN, True, int8)).items():
        check(values, row, want, kinds[row][1])
    assert status.tolist() == [STATUS_OK] * 4 + [77] + [STATUS_OK] * 3, "an empty sequence writes nothing"
    assert (values.view(-1, STRIDE)[[4, 7]] == UNTOUCHED).all()


def test_tiles_follow_from_the_size_of_the_step() -> None:
    assert [_tile_tokens(n) for n in (33, 1024, 1025, 4096, 12_800, 100_000)] == [32, 32, 64, 128, 256, 256]


def test_failed_rows_are_zero() -> None:
    kinds = [
        ("mean", "float32", -1, 1),
        ("last_token", "int8", -1, 0),
        ("cls", "binary", -1, 0),
        ("mean", "int8", 8, 0),
    ]
    hidden = torch.randn(12, HIDDEN, device=DEVICE)
    hidden[4, 3] = float("inf")
    hidden[10, 40] = float("nan")  # beyond the cut of its row: fails all the same
    cu_seqlens = torch.arange(0, 13, 3, dtype=torch.int32, device=DEVICE)
    status = torch.tensor([STATUS_OK, STATUS_OK, STATUS_BAD_TOKEN, STATUS_OK], dtype=torch.int32, device=DEVICE)
    hidden[5, 0] = float("-inf")
    values = torch.full((STRIDE * 4,), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    pool_rows(hidden, cu_seqlens, make_table(kinds).to(DEVICE), status, values, Defaults("cls", False, True))
    assert status.tolist() == [STATUS_OK, STATUS_NON_FINITE, STATUS_BAD_TOKEN, STATUS_NON_FINITE]
    for row, num_bytes in ((1, HIDDEN), (2, (HIDDEN + 7) // 8), (3, 8)):
        assert (values[row * STRIDE :][:num_bytes] == 0).all()
        assert (values[row * STRIDE + num_bytes : (row + 1) * STRIDE] == UNTOUCHED).all()


def test_scores_and_vectors() -> None:
    lengths = [2, 0, 5]
    cu_seqlens = torch.tensor([0, 2, 2, 7], dtype=torch.int32, device=DEVICE)
    table = make_table([("mean", "float32", -1, -1)] * 3).to(DEVICE)
    scores = torch.tensor([[0.25], [9.0], [float("nan")]], device=DEVICE)
    status = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    values = torch.full((STRIDE * 3,), UNTOUCHED, dtype=torch.uint8, device=DEVICE)
    convert_rows(scores, cu_seqlens, table, status, values, Defaults("cls", False, False))
    assert values.view(torch.float32)[0] == 0.25
    assert (values[STRIDE : 2 * STRIDE] == UNTOUCHED).all()
    assert values.view(torch.float32)[2 * STRIDE // 4] == 0
    assert status.tolist() == [STATUS_OK, STATUS_OK, STATUS_NON_FINITE]
    hidden = torch.randn(9, HIDDEN, device=DEVICE)
    vectors = pool_vectors(hidden, cu_seqlens, table, Defaults("cls", False, False))
    torch.testing.assert_close(vectors[0], hidden[:2].mean(0))
    torch.testing.assert_close(vectors[2], hidden[2:7].mean(0))
    assert (vectors[1] == 0).all()
    assert len(lengths) == len(vectors)

"""Products of few rows against torch, in Triton's interpreter where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rose.kernels.few_rows import MAX_ROWS, Block, block_of, few_rows_product, linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (
    [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float16]
)  # the interpreter multiplies no bfloat16
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
COLUMNS, DEPTH = 48, 384
EPS = 1e-5
TILED, PLAIN = Block(16, 128, 1, 3, 2, tiled=True), Block(4, 256, 1, 3, 2)  # the second's last tile is not full


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "block"), [(1, PLAIN), (2, PLAIN), (1, TILED), (5, TILED), (MAX_ROWS, TILED)])
def test_product(num_rows: int, block: Block, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, DEPTH, dtype=dtype), random(COLUMNS, DEPTH, dtype=dtype, scale=0.05)
    residual = random(num_rows, COLUMNS, dtype=dtype)
    expected = x.float() @ weight.float().T
    close(few_rows_product(x, weight, block=block), expected)
    total = residual.float() + expected
    assert few_rows_product(x, weight, residual=residual, block=block) is residual
    close(residual, total)
    out = torch.empty_like(residual)
    assert few_rows_product(x, weight, out=out, block=block) is out
    close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "block"), [(1, PLAIN), (2, PLAIN), (3, TILED)])
def test_swiglu(num_rows: int, block: Block, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, DEPTH, dtype=dtype), random(2 * COLUMNS, DEPTH, dtype=dtype, scale=0.05)
    gate, up = (x.float() @ weight.float().T).chunk(2, -1)
    close(few_rows_product(x, weight, gated=True, block=block), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_norm_goes_along(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, DEPTH, dtype=dtype, scale=3.0), random(2 * COLUMNS, DEPTH, dtype=dtype, scale=0.05)
    norm = random(DEPTH, dtype=dtype)
    expected = F.rms_norm(x.float(), (DEPTH,), norm.float(), EPS) @ weight.float().T
    close(few_rows_product(x, weight, norm=(norm, EPS), block=PLAIN), expected)
    gate, up = expected.chunk(2, -1)
    close(few_rows_product(x, weight, norm=(norm, EPS), gated=True, block=PLAIN), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "block"), [(2, PLAIN), (7, TILED)])
def test_a_row_is_the_same_in_any_company(num_rows: int, block: Block, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, DEPTH, dtype=dtype), random(2 * COLUMNS, DEPTH, dtype=dtype, scale=0.05)
    together = few_rows_product(x, weight, gated=True, block=block)
    for row in range(num_rows):
        alone = few_rows_product(x[row : row + 1], weight, gated=True, block=block)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [PLAIN, TILED])
def test_rows_may_be_strided(block: Block, dtype: torch.dtype) -> None:
    wide, weight = random(2, 2 * DEPTH, dtype=dtype), random(COLUMNS, DEPTH, dtype=dtype, scale=0.05)
    x = wide[:, DEPTH:]
    close(few_rows_product(x, weight, block=block), x.float() @ weight.float().T)


def test_every_block_fits_its_shape() -> None:
    assert block_of(1, 100, 2048) is None, "columns in whole tiles"
    assert block_of(1, 2048, 2040) is None, "depth in whole tiles"
    assert block_of(MAX_ROWS + 1, 4096, 4096) is None
    assert block_of(3, 2048, 2048) is None, "the library splits its depth"
    shapes = [(3072, 2048), (2048, 8192), (4096, 14336), (6144, 4096), (28672, 4096), (128256, 4096), (4864, 896)]
    for num_rows in (1, 2, 3, 16, MAX_ROWS):
        for columns, depth in shapes:
            for gated, norm in ((False, False), (False, True), (True, False), (True, True)):
                block = block_of(num_rows, columns, depth, gated=gated, norm=norm)
                assert block is None or columns % block.columns == 0
                assert block is None or not block.tiled or depth % block.depth == 0
                assert block is None or block.tiled or num_rows <= 2


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 64), (2, 64), (3, 64), (40, 64), (3, 8192)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_linear_is_the_product_whatever_makes_it(num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
    """By values, by the library, and by tiles."""
    x, weight = (torch.randn(n, 128, device=DEVICE).to(dtype) for n in (2 * num_rows, num_columns))
    x = x[::2]  # rows that are not next to each other
    torch.testing.assert_close(linear(x, weight).float(), x.float() @ weight.float().T, atol=0.05, rtol=0.02)

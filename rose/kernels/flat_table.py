"""Block tables of rows as one list without gaps, as FlashInfer reads them, made on the device from real lengths."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rose.kernels.launch import next_power_of_2, pdl

_BLOCKS = 1024  # entries copied at a time


@triton.jit(do_not_specialize=["num_rows"])
def _flat_table_kernel(
    kv_lengths_ptr, table_ptr, indptr_ptr, indices_ptr, last_ptr, num_rows, table_stride,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    other = tl.arange(0, ROWS)
    lengths = tl.load(kv_lengths_ptr + other, mask=other < num_rows, other=0)
    begin = tl.sum(tl.where(other < row, tl.cdiv(lengths, BLOCK_SIZE), 0), axis=0)
    length = tl.load(kv_lengths_ptr + row)
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    if row == 0:
        tl.store(indptr_ptr, 0)
    tl.store(indptr_ptr + row + 1, begin + num_blocks)
    tl.store(last_ptr + row, length - (num_blocks - 1) * BLOCK_SIZE)  # a whole one of a row without keys
    for first in range(0, num_blocks, BLOCKS):
        index = first + tl.arange(0, BLOCKS)
        inside = index < num_blocks
        block = tl.load(table_ptr + row.to(tl.int64) * table_stride + index, mask=inside)
        tl.store(indices_ptr + begin + index, block, mask=inside)


def flat_table(
    kv_lengths: Tensor, block_table: Tensor, block_size: int, indptr: Tensor, indices: Tensor, last: Tensor
) -> None:
    """kv_lengths [R] and block_table [R, max_blocks] -> indptr [R + 1], where each row's blocks begin in `indices`
    [>= all blocks], and `last` [R], how many keys its last block has. All int32."""
    num_rows, most = block_table.shape
    _flat_table_kernel[(num_rows,)](
        kv_lengths, block_table, indptr, indices, last, num_rows, block_table.stride(0),
        BLOCK_SIZE=block_size, ROWS=next_power_of_2(num_rows), BLOCKS=min(_BLOCKS, next_power_of_2(most)),
        **pdl(kv_lengths),
    )  # fmt: skip

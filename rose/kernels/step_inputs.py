"""What follows from the packed inputs of a step, made on the device: positions, token types, and each row's status.

So only rows, offsets and ids cross the bus, in one copy.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ipc.step import ROW_STATUS, ROW_TYPE_START
from rose.kernels.launch import pdl

_TOKENS, _SEQS = 64, 128  # compared by one program at a time
_TYPE_START, _STATUS = tl.constexpr(ROW_TYPE_START), tl.constexpr(ROW_STATUS)
_COLUMNS = tl.constexpr(8)  # of the table


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])  # one compilation for every step
def _step_inputs_kernel(
    rows_ptr, cu_seqlens_ptr, positions_ptr, types_ptr, status_ptr, num_seqs, num_tokens,
    TOKENS: tl.constexpr, SEQS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.zeros((TOKENS,), tl.int32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for begin in range(0, num_seqs, SEQS):
        seq = begin + tl.arange(0, SEQS)
        present = seq < num_seqs
        ends = tl.load(cu_seqlens_ptr + 1 + seq, mask=present, other=0)
        row += tl.sum((present[None, :] & (ends[None, :] <= token[:, None])).to(tl.int32), axis=1)
        if tl.program_id(0) == 0:
            status = tl.load(rows_ptr + seq * _COLUMNS + _STATUS, mask=present, other=0)
            tl.store(status_ptr + seq, tl.maximum(status, 0), mask=present)
    inside = row < num_seqs  # tokens behind the last sequence are padding
    position = tl.where(inside, token - tl.load(cu_seqlens_ptr + row, mask=inside, other=0), 0)
    type_start = tl.load(rows_ptr + row * _COLUMNS + _TYPE_START, mask=inside, other=-1)
    written = token < num_tokens
    tl.store(positions_ptr + token, position, mask=written)
    tl.store(types_ptr + token, ((type_start >= 0) & (position >= type_start)).to(tl.int32), mask=written)


def step_inputs(rows: Tensor, cu_seqlens: Tensor, positions: Tensor, token_types: Tensor, status: Tensor) -> None:
    """Fills positions and token_types [T] and status [N] from rows [N, 8] and cu_seqlens [N+1]; all int32.

    A token's type is 1 from its row's ROW_TYPE_START on. Tokens behind the last sequence have position and type 0;
    sequences may be empty. A row's status is its ROW_STATUS; negative counts as STATUS_OK.
    """
    num_seqs, num_tokens = len(rows), len(positions)
    _step_inputs_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        rows, cu_seqlens, positions, token_types, status, num_seqs, num_tokens, TOKENS=_TOKENS, SEQS=_SEQS, **pdl(rows)
    )

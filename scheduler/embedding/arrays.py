"""An encode step's rows into a slot of the ring, and its results out of it. The layout is ipc.step_ring's.

Rows that follow each other in a request are written and read as one block.
"""

import numpy as np
from numpy.typing import NDArray

from ipc.step import (
    DTYPE_CODES,
    POOLING_CODES,
    ROW_DIMENSIONS,
    ROW_DTYPE,
    ROW_NORMALIZE,
    ROW_OUTPUT_OFFSET,
    ROW_POOLING,
    ROW_TYPE_START,
)
from ipc.step_ring import Arrays
from ipc.types import OutputSpec
from scheduler.request import Run

MODEL_DEFAULT = -1
_NUM_COLUMNS = 8
_ALIGN = 4  # of each output row; no row is wider than 4 bytes a dimension, so the region always suffices


def write_rows(runs: list[Run], arrays: Arrays) -> tuple[int, int, list[int]]:
    """Fills a slot's inputs. Returns (num_seqs, num_tokens, the output offset of each run)."""
    input_ids, cu_seqlens, rows = arrays["input_ids"], arrays["cu_seqlens"], arrays["rows"]
    row = token = offset = 0
    offsets = []
    cu_seqlens[0] = 0
    for run in runs:
        request, start, stop = run
        num_rows, first, last = stop - start, request.cu_seqlens[start], request.cu_seqlens[stop]
        input_ids[token : token + last - first] = request.input_ids[first:last]
        stride = _stride(request.row_bytes)
        line = _line(request.submit.spec)
        type_starts = request.submit.type_starts
        if num_rows == 1:  # the common query: no temporary arrays
            line[ROW_TYPE_START] = type_starts[start] if type_starts else MODEL_DEFAULT
            line[ROW_OUTPUT_OFFSET] = offset
            rows[row] = line
            cu_seqlens[row + 1] = token + last - first
        else:
            table = rows[row : row + num_rows]
            table[:] = line
            if type_starts:
                table[:, ROW_TYPE_START] = type_starts[start:stop]
            table[:, ROW_OUTPUT_OFFSET] = np.arange(offset, offset + num_rows * stride, stride)
            ends = np.asarray(request.cu_seqlens[start + 1 : stop + 1], np.int64)
            cu_seqlens[row + 1 : row + 1 + num_rows] = ends + (token - first)
        offsets.append(offset)
        row, token, offset = row + num_rows, token + last - first, offset + num_rows * stride
    return row, token, offsets


def write_canary(arrays: Arrays) -> tuple[int, int]:
    """One row of the one token that every vocabulary has. Returns (num_seqs, num_tokens)."""
    line = _line(OutputSpec())
    arrays["input_ids"][0] = 0
    arrays["cu_seqlens"][:2] = (0, 1)
    arrays["rows"][0] = line
    return 1, 1


def read_rows(run: Run, offset: int, arrays: Arrays) -> bytes:
    """The results of `run`, `row_bytes` each without gaps."""
    num_rows, row_bytes = run.stop - run.start, run.request.row_bytes
    stride = _stride(row_bytes)
    block = arrays["values"][offset : offset + num_rows * stride]
    if stride != row_bytes:
        block = block.reshape(num_rows, stride)[:, :row_bytes]
    return block.tobytes()


def read_status(num_seqs: int, arrays: Arrays) -> NDArray[np.generic]:
    return arrays["status"][:num_seqs]


def _line(spec: OutputSpec) -> list[int]:
    line = [0] * _NUM_COLUMNS
    line[ROW_TYPE_START] = MODEL_DEFAULT
    line[ROW_POOLING] = MODEL_DEFAULT if spec.pooling is None else POOLING_CODES[spec.pooling]
    line[ROW_DTYPE] = DTYPE_CODES[spec.dtype]
    line[ROW_DIMENSIONS] = MODEL_DEFAULT if spec.dimensions is None else spec.dimensions
    line[ROW_NORMALIZE] = MODEL_DEFAULT if spec.normalize is None else int(spec.normalize)
    return line


def _stride(row_bytes: int) -> int:
    return -(-row_bytes // _ALIGN) * _ALIGN

"""Attention over a paged cache on a GPU: which backends can run, and which one serves how many rows.

The choice follows from (heads, head_dim, number of rows, queries of a row), never from lengths, so that every rank and
every replay of a graph agrees. bench/micro/decode_step.py measures the table (paged_choice_table.py).
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from math import log2
from typing import NamedTuple, Protocol

import torch

from rose.attention.interface import Attend, AttentionShape
from rose.attention.paged import PagedKV, PagedRows
from rose.attention.paged_choice_table import TABLE
from rose.attention.paged_triton import TritonPagedBackend
from rose.attention.static import StaticAttention


class PagedChoice(NamedTuple):
    """The fastest backend where it was measured: rows of q queries each."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    num_rows: int
    q: int
    backend: str


class _StaticBackend(Protocol):
    def static(self, rows: PagedRows, caches: Sequence[PagedKV], shape: AttentionShape) -> StaticAttention: ...


class PagedBackends:
    """`override` names the one to use, or is auto; `num_plans` is how many steps' plans may be pending. Rows of several
    queries are triton's in any case.

    Raises ValueError for an override that cannot run here.
    """

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, override: str, num_plans: int
    ) -> None:
        self._shape, self._dtype, self._device, self._num_plans = shape, dtype, device, num_plans
        self._triton = TritonPagedBackend()
        self._made: dict[str, _StaticBackend] = {"triton": self._triton}
        self._available = available(shape, device)
        if override not in ("auto", *self._available):
            raise ValueError(
                f"attention backend {override!r} is not available here for language models: "
                f"use auto or {', '.join(self._available)}"
            )
        self._override = None if override == "auto" else override
        self.choose = cache(self._choose)

    def paged(self, rows: PagedRows, caches: Sequence[PagedKV]) -> Attend:
        """One forward pass of a step that has no graph."""
        return self._triton.paged(rows, caches)

    def static(self, name: str, rows: PagedRows, caches: Sequence[PagedKV]) -> StaticAttention:
        """For graphs over the device's `rows`. `prepare` is given offsets of the rows' bounds of keys."""
        if name not in self._made:
            from rose.attention.paged_flashinfer import FlashInferPagedBackend

            self._made[name] = FlashInferPagedBackend(self._device, self._dtype, num_plans=self._num_plans)
        return self._made[name].static(rows, caches, self._shape)

    def _choose(self, num_rows: int, q: int) -> str:
        if q > 1:  # FlashInfer's decode, planned from bounds above the lengths, is wrong there
            return "triton"
        return self._override or choose(self._shape, num_rows, q, available=self._available)


def available(shape: AttentionShape, device: torch.device) -> tuple[str, ...]:
    """Backends that can run decode rows of `shape` here, the first serving where nothing was measured.

    fa2 is FlashInfer's tensor-core decode, which is its fa2 kernel.
    """
    if device.type == "cuda" and shape.head_dim in (64, 128) and importlib.util.find_spec("flashinfer") is not None:
        return ("triton", "fa2")
    return ("triton",)


def choose(
    shape: AttentionShape,
    num_rows: int,
    q: int,
    *,
    available: Sequence[str],
    table: Sequence[PagedChoice] | None = None,
) -> str:
    """The backend measured fastest at the point nearest in (rows, queries), of the nearest heads; on a logarithmic
    scale, among those `available`."""
    rows = [row for row in (_TABLE if table is None else table) if row.backend in available]
    if not rows:
        return available[0]
    return min(rows, key=lambda row: _distance(row, shape, num_rows, q)).backend


def _distance(row: PagedChoice, shape: AttentionShape, num_rows: int, q: int) -> tuple[float, float]:
    heads = abs(log2(row.num_heads / row.num_kv_heads * shape.num_kv_heads / shape.num_heads))
    kv_rows = log2(row.num_rows * row.num_kv_heads) - log2(num_rows * shape.num_kv_heads)
    return abs(log2(row.head_dim / shape.head_dim)) + heads, abs(kv_rows) + abs(log2(row.q / q))


_TABLE = tuple(PagedChoice(*row) for row in TABLE)

"""A backend that reads past ends, made safe; and that none of them runs bare."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rose.attention import backends
from rose.attention.choice import SPREADING
from rose.attention.contained import ContainedBackend
from rose.attention.interface import Attend, AttentionShape, Sequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = AttentionShape(2, 2, 32, 32**-0.5, False)
OFFSETS, NUM_TOKENS = [0, 9, 40, 41, 60], 70


class Spreading:
    """Whole tiles of keys: those past an end are masked and weighed with 0. Both ways at once."""

    def __init__(self, offsets: list[int] | None = None) -> None:
        self.prepare(offsets or [])

    def ragged(self, sequences: Sequences) -> Attend:
        return Spreading(sequences.cu_seqlens_host)

    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> "Spreading":
        return Spreading()

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        self._offsets = cu_seqlens_host

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
        out = torch.zeros_like(q)
        for start, end in pairwise(self._offsets):
            stop = min(start + 64, q.shape[1])
            scores = q[:, start:end] @ k[:, start:stop].transpose(1, 2)
            scores[:, :, end - start :] = -math.inf
            out[:, start:end] = scores.softmax(-1) @ v[:, start:stop]
        return out.transpose(0, 1)


def failing(attend: Attend) -> list[bool]:
    """Which sequences are not finite with NaN in the second and in the padding."""
    torch.manual_seed(0)
    qkv = torch.randn(NUM_TOKENS, 3, 2, 32).to(torch.bfloat16).to(DEVICE)
    qkv[20] = qkv[65] = math.nan
    out = attend(qkv[:, 0], qkv[:, 1], qkv[:, 2], SHAPE)
    return [not bool(out[start:end].isfinite().all()) for start, end in pairwise(OFFSETS)]


def both_ways(backend: Any) -> list[Attend]:
    cu_seqlens = torch.tensor(OFFSETS, dtype=torch.int32, device=DEVICE)
    static = backend.static(cu_seqlens, NUM_TOKENS, SHAPE)
    static.prepare(OFFSETS)
    return [backend.ragged(Sequences(OFFSETS, cu_seqlens)), static]


def test_a_bad_sequence_fails_alone() -> None:
    for attend in both_ways(Spreading()):
        assert failing(attend) == [True, True, True, True]
    for attend in both_ways(ContainedBackend(Spreading())):
        assert failing(attend) == [False, True, False, False]


@pytest.mark.parametrize("name", SPREADING)
def test_no_such_backend_runs_bare(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(backends, "available", lambda *_: (name, "sdpa"))
    monkeypatch.setattr(backends.Backends, "_make", lambda self, name: Spreading())
    made = backends.Backends(SHAPE, torch.bfloat16, DEVICE, override=name, num_plans=2)
    cu_seqlens = torch.tensor(OFFSETS, dtype=torch.int32, device=DEVICE)
    static = made.static(name, cu_seqlens, NUM_TOKENS)
    static.prepare(OFFSETS)
    for attend in (made.once(name, Sequences(OFFSETS, cu_seqlens), NUM_TOKENS), static):
        assert failing(attend) == [False, True, False, False]

"""Triton attention behind the interface, against the reference backend."""

import torch

from rose.attention.interface import AttentionShape, Sequences
from rose.attention.sdpa import SdpaBackend
from rose.attention.triton_ragged import TritonBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_same_as_the_reference() -> None:
    shape = AttentionShape(4, 2, 32, 32**-0.5, True)
    offsets = [0, 9, 10, 27]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(27, heads, 32, device=DEVICE).to(torch.float16) for heads in (4, 2, 2))
    sequences = Sequences(offsets, cu_seqlens)
    expected = SdpaBackend().ragged(sequences)(q, k, v, shape)
    torch.testing.assert_close(TritonBackend().ragged(sequences)(q, k, v, shape), expected, atol=5e-3, rtol=5e-3)
    static = TritonBackend().static(cu_seqlens, 27, shape)
    static.prepare(offsets)
    torch.testing.assert_close(static(q, k, v, shape), expected, atol=5e-3, rtol=5e-3)

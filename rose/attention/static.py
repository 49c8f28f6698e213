"""Attention of one captured graph: what is planned on the host before a replay, and the call that is captured.

Buffers belong to the key (number of sequences, number of tokens); lengths under it may differ from replay to replay.
"""

from typing import Protocol

from torch import Tensor

from rose.attention.interface import AttentionShape


class StaticAttention(Protocol):
    def prepare(self, cu_seqlens_host: list[int]) -> None:
        """Before each run and each replay, on its stream: the lengths of the coming step. Before a capture: all tokens
        in the first sequence, so that no launch is sized for less; after it again, before the replay.

        N + 1 offsets; empty sequences allowed; the last may be below the key's number of tokens. Never waits for the
        device; may enqueue copies.
        """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        """An `Attend`. Rows behind the last sequence come out finite."""


class StaticBackend(Protocol):
    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> StaticAttention:
        """For graphs over the device offsets `cu_seqlens` (int32 [N+1], a static buffer) and T = num_tokens rows."""

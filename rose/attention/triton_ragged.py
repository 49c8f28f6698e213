"""Our own ragged attention in Triton. Reads lengths on the device: nothing to plan, one graph serves any lengths."""

from torch import Tensor

from rose.attention.interface import Attend, AttentionShape, Sequences
from rose.kernels.ragged_attention import ragged_attention


class TritonBackend:
    """Keeps no state. float16 and bfloat16; head_dim a power of two."""

    def ragged(self, sequences: Sequences) -> Attend:
        return TritonAttention(sequences.cu_seqlens)

    def static(self, cu_seqlens: Tensor, num_tokens: int, shape: AttentionShape) -> "TritonAttention":
        return TritonAttention(cu_seqlens)


class TritonAttention:
    """Attention over the sequences that `cu_seqlens` (int32 [N+1], on the device) names when the kernel runs."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        self._cu_seqlens = cu_seqlens

    def prepare(self, cu_seqlens_host: list[int]) -> None:
        """Nothing to do: the kernel reads the device's offsets."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape) -> Tensor:
        return ragged_attention(q, k, v, self._cu_seqlens, scale=shape.scale, causal=shape.causal)

"""Linear layers for decoding in float32 on CPU: weights as [in_features, out_features]; the product adds the residual.

A pass through SmolLM2's layers on one core (Xeon, AVX-512) took so many ms, against F.linear and packed weights
(rose.layers.packed_linear): 1 row 30, 32, 37; 8 rows 60, 81, 51; 64 rows 102, 146, 126; 256 rows 391, 399, 385. A head,
many times wider than its input, is better packed: 8 rows 17, 31, 12. On huge pages one row takes a tenth less again.
"""

import contextlib
import mmap

import torch
from torch import Tensor, nn

from rose.layers.activation import activation
from rose.layers.linear import Linear
from rose.layers.norm import RMSNorm

_ALIGNMENT = 16  # values: a cache line


class TransposedLinear(nn.Module):
    """A Linear that cannot be trained or saved: it has no parameters. Its weight goes to `memory`, a float32 vector."""

    def __init__(self, linear: Linear, memory: Tensor) -> None:
        super().__init__()
        weight = linear.weight.detach().t()
        self._weight = memory[: weight.numel()].view(weight.shape).copy_(weight)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._group = linear.group
        self._activation = None if linear.act == "identity" else activation(linear.act)

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        if residual is not None and self._activation is None and self._group.size == 1:
            residual = residual if self._bias is None else residual.add_(self._bias)
            return residual.addmm_(x, self._weight)
        y = torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)
        y = self._group.all_reduce(y)
        y = y if self._activation is None else self._activation(y)
        return y if residual is None else residual.add_(y)


def transpose_linears(model: nn.Module) -> None:
    """Replaces every Linear of `model` that is float32 on CPU."""
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Linear) and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu"
    ]
    if not places:
        return
    sizes = [-(-getattr(parent, name).weight.numel() // _ALIGNMENT) * _ALIGNMENT for parent, name in places]
    for (parent, name), memory in zip(places, _on_huge_pages(sum(sizes)).split(sizes), strict=True):
        setattr(parent, name, TransposedLinear(getattr(parent, name), memory))


def _on_huge_pages(num_values: int) -> Tensor:
    """float32 [num_values]. Pages are taken when they are first written: weights move there one by one."""
    memory = mmap.mmap(-1, num_values * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)

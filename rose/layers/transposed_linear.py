"""Linear layers for decoding in float32 on CPU: weights as [in_features, out_features]; the product adds the residual.

A wide matrix (gate and up, the head) is divided by outputs into panels, [panels, in_features, width]: a batch of
products, whose operands the library need not copy before it multiplies a few rows.

A pass through SmolLM2's layers on one core (Xeon, AVX-512) takes so many ms, against F.linear and packed weights
(rose.layers.packed_linear): 1 row 33, 32, 37; 8 rows 57, 77, 49; 64 rows 103, 147, 126; 256 rows 385, 410, 385.
Its head: 1 row 7.7, 7.8, 7.7; 8 rows 12.5, 28, 11. On huge pages one row takes a tenth less.
"""

import contextlib
import mmap

import torch
from torch import Tensor, nn

from rose.layers.activation import activation
from rose.layers.linear import Linear
from rose.layers.norm import RMSNorm

_ALIGNMENT = 16  # values: a cache line
_WIDE = 2  # outputs for each input, from which on a matrix is divided into panels
_PANEL = 192  # outputs of one


class TransposedLinear(nn.Module):
    """A Linear that cannot be trained or saved: it has no parameters. Its weight goes to `memory`, a float32 vector of
    `num_values`."""

    def __init__(self, linear: Linear, memory: Tensor) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self._out_features, in_features = weight.shape
        width = _panel_width(linear)
        self._panels = memory[: num_values(linear)].view(-1, in_features, width)
        for panel, outputs in zip(self._panels, weight.split(width), strict=True):
            panel[:, : len(outputs)] = outputs.t()
            panel[:, len(outputs) :] = 0.0
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._group = linear.group
        self._activation = None if linear.act == "identity" else activation(linear.act)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], in new memory."""
        return self._panels.transpose(1, 2).flatten(0, 1)[: self._out_features].clone()

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        is_wide = len(self._panels) > 1
        if residual is not None and not is_wide and self._activation is None and self._group.size == 1:
            residual = residual if self._bias is None else residual.add_(self._bias)
            return residual.addmm_(x, self._panels[0])
        y = self._by_panels(x) if is_wide else torch.mm(x, self._panels[0])
        y = self._group.all_reduce(y if self._bias is None else y.add_(self._bias))
        y = y if self._activation is None else self._activation(y)
        return y if residual is None else residual.add_(y)

    def _by_panels(self, x: Tensor) -> Tensor:
        y = torch.bmm(x.expand(len(self._panels), *x.shape), self._panels)  # [panels, T, width]
        return y.transpose(0, 1).flatten(1)[:, : self._out_features].contiguous()


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
    sizes = [-(-num_values(getattr(parent, name)) // _ALIGNMENT) * _ALIGNMENT for parent, name in places]
    for (parent, name), memory in zip(places, _on_huge_pages(sum(sizes)).split(sizes), strict=True):
        setattr(parent, name, TransposedLinear(getattr(parent, name), memory))


def num_values(linear: Linear) -> int:
    """What its transposed weight takes, in float32 values: the last panel is filled up with zeros."""
    out_features, in_features = linear.weight.shape
    width = _panel_width(linear)
    return -(-out_features // width) * width * in_features


def _panel_width(linear: Linear) -> int:
    """Outputs of a panel; all of them where there is one."""
    out_features, in_features = linear.weight.shape
    return _PANEL if out_features >= max(_WIDE * in_features, 2 * _PANEL) else out_features


def _on_huge_pages(num_values: int) -> Tensor:
    """float32 [num_values]. Pages are taken when they are first written: weights move there one by one."""
    memory = mmap.mmap(-1, num_values * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32)

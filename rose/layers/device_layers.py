"""Which layers a language model has where it runs. The weights stay, or go where these layers keep theirs."""

import torch
from torch import nn

from rose.layers.packed_linear import pack_linears
from rose.layers.transposed_linear import transpose_linears


def use_device_layers(model: nn.Module, device: torch.device) -> None:
    """Puts the layers of `model` that its device is fast with in place of the plain ones."""
    if device.type == "cpu":
        transpose_linears(model)
        pack_linears(model)  # what is not float32
        return
    from rose.layers.kernel_layers import use_kernels  # needs Triton

    use_kernels(model)

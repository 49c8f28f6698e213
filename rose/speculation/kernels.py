"""Whether a step's small work is done by kernels (a GPU) or in torch (a CPU, and the reference of the kernels).

Kernels are imported where they are called: Triton need not be there without a GPU.
"""

from torch import Tensor


def has_kernels(tensor: Tensor) -> bool:
    """Of the device that `tensor` lies on. There nothing may wait for it, either."""
    return tensor.is_cuda

"""How kernels are launched: block sizes, and programmatic dependent launch (PDL) where the device has it.

With PDL a kernel is scheduled while its predecessor still runs and waits inside (`gdc_wait`) until that one has
finished and its writes are visible. So every kernel launched this way waits before its first read of another
kernel's output and before its first write; only constants (weights) may be touched earlier.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

_PDL_CAPABILITY = (9, 0)  # Hopper
_state = {"pdl": True}


def use_pdl(enabled: bool) -> None:
    """Turns programmatic dependent launch on or off for kernels launched (or captured) from now on."""
    _state["pdl"] = enabled


def pdl(tensor: Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel that has the constexpr `PDL`."""
    if not (_state["pdl"] and tensor.is_cuda and _has_pdl(tensor.device)):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _PDL_CAPABILITY


def stages_that_fit(num_stages: int, stage_bytes: int, tensor: Tensor, other_bytes: int = 0) -> int:
    """As many tiles on their way, or fewer: what a multiprocessor of the tensor's device has shared memory for."""
    if not tensor.is_cuda:
        return num_stages
    return max(1, min(num_stages, (_shared_bytes(tensor.device) - other_bytes) // stage_bytes))


@cache
def _shared_bytes(device: torch.device) -> int:
    found: int = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return found


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def row_warps(block: int) -> int:
    """Warps for one program that holds a row of `block` values: 8 values a thread, the width of one 16-byte load."""
    return max(1, min(8, block // 256))

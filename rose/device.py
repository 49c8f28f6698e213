"""What differs between devices: their names, and page-locking."""

import contextlib
import ctypes
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray


def resolve_device(name: str) -> str:
    """`auto` becomes cuda where there is one. Raises ValueError for a device that is not there."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_cuda else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not known: use auto, cpu or cuda")
    if name == "cuda" and not has_cuda:
        raise ValueError('device is cuda, but torch finds none: check the driver, or set device = "cpu"')
    return name


def resolve_dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def pin(memory: NDArray[np.uint8]) -> bool:
    """Page-locks a mapping, so that copies from and to it are asynchronous; tells whether the driver did it."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # the driver reports its refusal once more, to the next launch
        torch.zeros(1, device="cuda")
    return False


def async_copies(stream: int) -> Callable[[int, int, int], None]:
    """`copy(target, source, num_bytes)` between addresses of page-locked and device memory, enqueued on a CUDA stream.

    The driver's own call: torch's would cost the launching thread several times as much for views of both sides.
    """
    enqueue = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    enqueue.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def copy(target: int, source: int, num_bytes: int) -> None:
        if error := enqueue(target, source, num_bytes, stream):
            raise RuntimeError(f"CUDA error {error}: a copy of {num_bytes} bytes could not be enqueued")

    return copy


def unpin(memory: NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)

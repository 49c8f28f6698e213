"""What differs between devices: names, page-locking, and how a step is launched on a GPU."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rose.lazy_tensor import CudaLazyTensor
from rose.runner import OutOfMemory


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
    """Page-locks a mapping, so that copies from and to it are asynchronous; tells whether that worked.

    Where it does not (a low locked-memory limit), copies wait for the device: as right, only slower.
    """
    return int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0


def unpin(memory: NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)


def launch_on_cuda(works: Sequence[Callable[[], None]]) -> CudaLazyTensor:
    """Enqueues the works on the current stream, and behind them the event that tells of their end.

    Raises OutOfMemory where the device's memory does not suffice.
    """
    try:
        with torch.inference_mode():
            for work in works:
                work()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(str(error)) from error
    event = torch.cuda.Event()
    event.record()
    return CudaLazyTensor(event)

"""What differs between devices: their names, and page-locking."""

import contextlib

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


def unpin(memory: NDArray[np.uint8]) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)

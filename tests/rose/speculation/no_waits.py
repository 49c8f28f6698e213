"""What steps that may become graphs must not do, found on a CPU; and how many kernels they launch.

On a GPU each of these waits for the device, takes its size from what the device knows, or copies from the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

WAITS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique",
    "_unique",
    "equal",
    "bincount",
)
FROM_HOST = ("tensor", "as_tensor", "from_numpy", "asarray")
TO_HOST = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias")


class Wait(AssertionError):
    """Something waits for the device."""


class Launches(TorchDispatchMode):
    """`kernels`: names of what was launched, in order, torch's operators and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name.startswith(WAITS) or (name == "repeat_interleave" and "Tensor" in func._overloadname):
            raise Wait(f"{func} waits for the device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                raise Wait(f"{func} by a mask has a size that the device knows")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and name not in ALLOCATIONS:
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits() -> Iterator[Launches]:
    """Raises Wait within."""
    launches = Launches()
    run = interpreter.GridExecutor.__call__
    inside = False  # a kernel, whose interpreter may do as it likes

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        launches.kernels.append(self.fn.__name__)
        inside = True
        try:
            with _disable_current_modes():
                run(self, *args, **kwargs)
        finally:
            inside = False

    def refused(what: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return original(*args, **kwargs)
            raise Wait(f"{what} goes between host and device")

        return call

    def indexed(original: Any) -> Any:
        def call(self: Tensor, index: Any, *value: Any) -> Any:
            if isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(x, list) for x in index)):
                raise Wait("a list of indices goes from host to device")
            return original(self, index, *value)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__getitem__", "__setitem__"):
            patch.setattr(Tensor, name, indexed(getattr(Tensor, name)))
        patch.setattr(interpreter.GridExecutor, "__call__", run_kernel)
        for name in FROM_HOST:
            patch.setattr(torch, name, refused(f"torch.{name}", getattr(torch, name)))
        for name in TO_HOST:
            patch.setattr(Tensor, name, refused(f"Tensor.{name}", getattr(Tensor, name)))
        with launches:
            yield launches

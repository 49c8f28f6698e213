"""The attention backends of one model on one device: which can run, and which one a shape takes."""

import importlib.util
from functools import cache

import torch
from torch import Tensor

from rose.attention.choice import SPREADING, choose
from rose.attention.contained import BothWays, ContainedBackend
from rose.attention.flash4 import Flash4Backend
from rose.attention.flashinfer_ragged import FlashInferBackend
from rose.attention.interface import Attend, AttentionShape, Sequences
from rose.attention.sdpa import SdpaBackend
from rose.attention.static import StaticAttention
from rose.attention.triton_ragged import TritonBackend

_HOPPER = (9, 0)


class Backends:
    """`override` names the one to use; `num_plans` is how many steps' plans may be pending. Raises ValueError for an
    override that cannot run here."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device, *, override: str, num_plans: int
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._num_plans = num_plans
        self._override = override
        self._available = available(shape, dtype, device)
        self._made: dict[str, BothWays] = {}
        self.choose = cache(self._choose)
        self.choose(1, 64)  # an override that cannot run shows now

    def static(self, name: str, cu_seqlens: Tensor, num_tokens: int) -> StaticAttention:
        """For steps of T = num_tokens over the device's offsets `cu_seqlens`; planned anew for each."""
        return self._get(name).static(cu_seqlens, num_tokens, self._shape)

    def once(self, name: str, sequences: Sequences, num_tokens: int) -> Attend:
        """For one step of T = num_tokens, of which those behind the last sequence are padding."""
        if name == "sdpa":
            attention = self.static(name, sequences.cu_seqlens, num_tokens)
            attention.prepare(sequences.cu_seqlens_host)
            return attention
        return self._get(name).ragged(sequences)

    def _choose(self, num_seqs: int, num_tokens: int) -> str:
        return choose(self._shape, num_seqs, num_tokens, override=self._override, available=self._available)

    def _get(self, name: str) -> BothWays:
        if name not in self._made:
            made = self._make(name)
            self._made[name] = ContainedBackend(made) if name in SPREADING else made
        return self._made[name]

    def _make(self, name: str) -> BothWays:
        match name:
            case "sdpa":
                return SdpaBackend()
            case "triton":
                return TritonBackend()
            case "fa2" | "fa3":
                return FlashInferBackend(name, self._device, self._dtype, num_plans=self._num_plans)
            case "flash4":
                return Flash4Backend()
        raise AssertionError(f"no backend is called {name!r}: BACKENDS names them")


def available(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Backends that can run `shape` here, the first serving where nothing was measured."""
    if dtype == torch.float32:  # kept for reference
        return ("sdpa",)
    names = []
    if shape.head_dim >= 16 and shape.head_dim.bit_count() == 1:
        names.append("triton")
    if device.type == "cuda":
        if _installed("flashinfer") and shape.head_dim in (32, 64, 128):
            names.append("fa2")
            if torch.cuda.get_device_capability(device) == _HOPPER:
                names.append("fa3")
        if _installed("flash_attn"):
            names.append("flash4")
    return (*names, "sdpa")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

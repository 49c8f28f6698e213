"""How a model's makers want its tokens picked: what generation_config.json says of fields that a request leaves open.

Knows the file, no request. As in vLLM; what else the file says is not ours (end tokens are the rank's to read).
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ipc.types import SamplingParams, Share


class GenerationDefaultsError(ValueError):
    """A generation_config.json that cannot be used; the text says why."""


class GenerationDefaults(Struct, frozen=True):
    """None: the file says nothing. `top_k` may be -1 there, for off."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None

    @classmethod
    def read(cls, model_dir: Path) -> "GenerationDefaults":
        """Raises GenerationDefaultsError."""
        file = model_dir / "generation_config.json"
        if not file.exists():
            return cls()
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            text = f"{file}: {error}; correct it, or set gateway.generation_defaults = false"
            raise GenerationDefaultsError(text) from None

    def fill(self, sampling: SamplingParams, left_open: frozenset[str]) -> SamplingParams:
        """`sampling` with the fields of names in `left_open` as the file has them, if it does."""
        found = {name: value for name in left_open if (value := getattr(self, name)) is not None}
        if "top_k" in found:
            found["top_k"] = max(found["top_k"], 0)
        return msgspec.structs.replace(sampling, **found) if found else sampling


WITH_DEFAULTS = GenerationDefaults.__struct_fields__

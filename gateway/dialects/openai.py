"""OpenAI's /v1/embeddings and /v1/models, with this server's own `truncate` and `prompt_name`."""

from binascii import b2a_base64
from collections.abc import Iterable
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from gateway.dialects.decode import decode
from gateway.dialects.fields import Texts, read_texts, refuse_unsupported
from gateway.errors import InvalidRequest
from gateway.tasks import EmbedOutcome, EmbedTask
from ipc.types import OutputSpec, VectorDType

FORMATS: dict[str, VectorDType] = {
    "float": "float32",
    "base64": "float32",  # little-endian
    "base64_int8": "int8",
    "base64_binary": "binary",  # one bit a dimension
}
UNSUPPORTED = ("input_type", "late_chunking", "truncate_prompt_tokens", "output_dtype", "embedding_type")
_unsupported = attrgetter(*UNSUPPORTED)
_NONE_GIVEN = (UNSET,) * len(UNSUPPORTED)


class EmbeddingsBody(Struct):
    model: str
    input: Texts
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    input_type: Raw | UnsetType = UNSET
    late_chunking: Raw | UnsetType = UNSET
    truncate_prompt_tokens: Raw | UnsetType = UNSET
    output_dtype: Raw | UnsetType = UNSET
    embedding_type: Raw | UnsetType = UNSET


_decoder = msgspec.json.Decoder(EmbeddingsBody)


def parse_embeddings(body: bytes) -> EmbedTask:
    """Raises InvalidRequest."""
    fields = decode(_decoder, body)
    if _unsupported(fields) != _NONE_GIVEN:
        refuse_unsupported(fields, UNSUPPORTED)
    format = "float" if fields.encoding_format is None else fields.encoding_format
    if format not in FORMATS:
        text = f"encoding_format is {format[:50]!r}; it may be {', '.join(FORMATS)}"
        raise InvalidRequest(text, param="encoding_format")
    inputs: Any = read_texts("input", fields.input)
    if fields.prompt_name is not None and not isinstance(inputs[0], str):
        raise InvalidRequest("prompt_name needs text; token ids are taken as given", param="prompt_name")
    return EmbedTask(
        model=fields.model,
        inputs=inputs,
        spec=OutputSpec(dtype=FORMATS[format], dimensions=fields.dimensions),
        encoding="float" if format == "float" else "base64",
        truncate=bool(fields.truncate),
        prompt_name=fields.prompt_name,
    )


def render_embeddings(task: EmbedTask, outcome: EmbedOutcome) -> bytes:
    vectors: Iterable[Any]
    if task.encoding == "float":
        vectors = outcome.rows.matrix("<f4")
    else:
        vectors = [b2a_base64(row, newline=False).decode("ascii") for row in outcome.rows]
    return orjson.dumps(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
            "model": task.model,
            "usage": {"prompt_tokens": outcome.num_tokens, "total_tokens": outcome.num_tokens},
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def render_models(max_lengths: dict[str, int | None], created: int) -> bytes:
    """The list of models, in the order of `max_lengths`."""
    data = [_model(name, max_len, created) for name, max_len in max_lengths.items()]
    return orjson.dumps({"object": "list", "data": data})


def render_model(name: str, max_len: int | None, created: int) -> bytes:
    return orjson.dumps(_model(name, max_len, created))


def _model(name: str, max_len: int | None, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "bouquet", "max_model_len": max_len}

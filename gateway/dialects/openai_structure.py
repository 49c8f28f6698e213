"""What an answer must look like: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_…` fields."""

from typing import Any

import msgspec
from msgspec import Struct

from gateway.errors import InvalidRequest
from gateway.tasks import Structure


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class StructureBody(Struct):
    """At most one of them says something."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None


def read_structure(fields: StructureBody) -> Structure | None:
    """Raises InvalidRequest where several say something; the schemas and patterns themselves are looked at later."""
    found = [structure for structure in _structures(fields) if structure.value is not None]
    if len(found) > 1:
        text = f"{found[0].param} and {found[1].param} exclude each other; leave one out"
        raise InvalidRequest(text, param=found[1].param)
    if not found:
        return None
    structure = found[0]
    if structure.kind == "schema" and isinstance(structure.value, str):
        return Structure("schema", _parsed(structure), structure.param)
    return structure


def _structures(fields: StructureBody) -> list[Structure]:
    inner = fields.structured_outputs or StructuredOutputs()
    format = fields.response_format
    return [
        Structure("format", None if format == {"type": "text"} else format, "response_format"),
        Structure("schema", fields.guided_json, "guided_json"),
        Structure("regex", fields.guided_regex, "guided_regex"),
        Structure("choice", fields.guided_choice, "guided_choice"),
        Structure("schema", inner.json, "structured_outputs.json"),
        Structure("regex", inner.regex, "structured_outputs.regex"),
        Structure("choice", inner.choice, "structured_outputs.choice"),
        Structure("format", {"type": "json_object"} if inner.json_object else None, "structured_outputs.json_object"),
    ]


def _parsed(structure: Structure) -> Any:
    try:
        return msgspec.json.decode(structure.value)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest(f"{structure.param} is not valid JSON", param=structure.param) from None

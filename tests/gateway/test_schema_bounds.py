"""Schemas that would take long to compile are refused, and those that do not are not."""

import time
from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.schema_bounds import MAX_PATTERNS, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, check_schema
from gateway.structured import Grammars

GRAMMARS = Grammars()


def pattern(i: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^x*{chr(97 + i)}.*"}


def patterns(num: int) -> list[dict[str, Any]]:
    return [pattern(i) for i in range(num)]


def chain(num: int) -> dict[str, Any]:
    """Patterns that meet by way of references."""
    links = {f"d{i}": {"allOf": [pattern(i), {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{num}": {"type": "string"}}}


def merged(num: int) -> dict[str, Any]:
    """Patterns that meet in a property of objects that meet."""
    return {"allOf": [{"type": "object", "properties": {"a": {"items": pattern(i)}}} for i in range(num)]}


def constants(num: int) -> dict[str, Any]:
    return {"anyOf": [{"const": i} for i in range(num)]}


def multiples(*values: float) -> dict[str, Any]:
    return {"type": "number", "allOf": [{"multipleOf": value} for value in values]}


def doubled(num: int, inner: dict[str, Any]) -> dict[str, Any]:
    links = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{num}": inner}}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"allOf": patterns(20)}, "patterns"),
        ({"pattern": "a", "allOf": [{"allOf": patterns(MAX_PATTERNS)}]}, "patterns"),
        (chain(20), "patterns"),
        (merged(20), "patterns"),
        ({"allOf": [{"anyOf": patterns(2)} for _ in range(8)]}, "patterns"),
        (doubled(60, pattern(0)), "patterns"),
        ({"allOf": [constants(10) for _ in range(4)]}, "alternatives"),
        (doubled(60, constants(2)), "alternatives"),
        ({"$ref": "#/$defs/a%2520/b"}, "leads nowhere"),
        ({"$ref": "#name", "$anchor": "name"}, "in the schema itself"),
        ({"$ref": "other.json"}, "in the schema itself"),
        ({"items": {"$id": "http://localhost/a", "$ref": "#/$defs/b"}}, r"\$id"),
        ({"items": {"multipleOf": 99991}}, "multipleOf"),
        (multiples(9973, 9967), "multipleOf"),
        (doubled(60, {"multipleOf": 2}), "multipleOf"),
        ({"type": "integer", "multipleOf": 0.12345678}, "multipleOf"),
        ({"multipleOf": 97, "anyOf": [{"multipleOf": 991}, {"allOf": [{"multipleOf": 10**30}]}]}, "multipleOf"),
        ({"enum": ["é" * MAX_SCHEMA_BYTES]}, "bytes"),
        (
            {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2000)}},
            "deep",
        ),
    ],
)
def test_what_would_take_long_is_refused_at_once(schema: dict[str, Any], says: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_schema(schema, "here")
    assert caught.value.param == "here"
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{i}": pattern(i % 26) for i in range(200)}},
        {"anyOf": patterns(26)},
        {"type": "object", "properties": {"$id": {"type": "string"}, "pattern": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}},
        {"allOf": [{"$ref": "#/$defs/a~1b%25"}], "$defs": {"a/b%": {"type": "string", "format": "date-time"}}},
        {"prefixItems": [{"type": "integer"}, {"$ref": "#/prefixItems/0"}], "type": "array"},
        constants(400),
        {"type": "number", "multipleOf": 0.25},
        {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
        multiples(97, 0.01, 101),
    ],
)
def test_usual_schemas_pass_and_compile(schema: dict[str, Any]) -> None:
    check_schema(schema, "here")
    start = time.process_time()
    GRAMMARS.of_schema(schema, "here")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("make", [lambda n: {"allOf": patterns(n)}, chain, merged])
def test_the_bound_on_patterns_is_one_that_compiles_fast(make: Any) -> None:
    """Right or wrong, the compiler's answer comes soon."""
    check_schema(make(MAX_PATTERNS), "here")
    start = time.process_time()
    try:
        GRAMMARS.of_schema(make(MAX_PATTERNS), "here")
    except InvalidRequest as error:
        assert "empty" in error.message or "enforced" in error.message  # noqa: PT017 - it may find it too hard
    assert time.process_time() - start < 2


def test_depth() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_SCHEMA_DEPTH - 1):
        schema = {"items": schema}
    check_schema(schema, "here")
    for _ in range(50_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="deeper"):
        check_schema(schema, "here")

"""What a JSON schema may cost before it is compiled: its size, its depth, and what it would intersect.

Compiling takes time exponential in the patterns that meet in one string (`allOf`, or `$ref` beside other keywords)
and in the alternatives that meet there, linear in the least common multiple of what `multipleOf` says of one number,
and cannot be interrupted. So all three are bounded from above here.
"""

import json
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple
from urllib.parse import unquote

from gateway.errors import InvalidRequest

MAX_SCHEMA_BYTES = 128 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_PATTERNS = 6  # that one string must match all at once: each more doubles the time
MAX_ALTERNATIVES = 500  # products of `anyOf` within `allOf`
MAX_MULTIPLE = 10_000  # product of `multipleOf` for one number: ranks need a state for each remainder

_CHILDREN = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_CHILD_LISTS = ("prefixItems", "items")
_OPTIONS = ("anyOf", "oneOf")


class _Weight(NamedTuple):
    """The most that meets in any one place of a schema."""

    patterns: int = 0
    alternatives: int = 1
    multiple: int = 1


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Raises InvalidRequest."""
    check_depth(schema, param)
    num_bytes = len(json.dumps(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} can be given", param=param)
    try:
        weight = _Scales(schema, param).weigh(schema)
    except RecursionError:
        raise InvalidRequest(f"the references in {param} lead too deep", param=param) from None
    if weight.patterns > MAX_PATTERNS:
        text = f"{param} makes one value match more than {MAX_PATTERNS} patterns, formats and bounds of length at once"
        raise InvalidRequest(text, param=param)
    if weight.alternatives > MAX_ALTERNATIVES:
        text = f"{param} combines alternatives within allOf in more than {MAX_ALTERNATIVES} ways"
        raise InvalidRequest(text, param=param)
    if weight.multiple > MAX_MULTIPLE:
        text = f"{param}: what multipleOf asks of one number must come to {MAX_MULTIPLE} at most, multiplied together"
        raise InvalidRequest(text, param=param)


def check_depth(value: Any, param: str) -> None:
    """Of any object or array, for compilers and templates. Raises InvalidRequest."""
    depth, level = 0, list[Any]([value])
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels", param=param)
        children = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for child in children for item in child if isinstance(item, dict | list)]


class _Scales:
    """Weighs the parts of one schema, what `$ref`s lead to once."""

    def __init__(self, root: dict[str, Any], param: str) -> None:
        self._root = root
        self._param = param
        self._of_targets: dict[int, _Weight] = {}  # by identity: one place can be spelled in thousands of ways

    def weigh(self, node: Any) -> _Weight:
        if not isinstance(node, dict):
            return _Weight()
        if "$id" in node and node is not self._root:
            raise self._refuse("$id within a schema is not supported; leave it out")
        own = sum(name in node for name in ("pattern", "format")) + ("minLength" in node or "maxLength" in node)
        inner = self._most(_children(node))
        multiple = max(_multiple(node.get("multipleOf")), inner.multiple)
        met = [_Weight(max(own, inner.patterns), inner.alternatives, multiple)]
        met.append(self._most(_values(node, "patternProperties")))
        met += map(self.weigh, _items(node, "allOf"))
        if isinstance(ref := node.get("$ref"), str):
            met.append(self._of_ref(ref))
        for name in _OPTIONS:
            if options := [self.weigh(item) for item in _items(node, name)]:
                most = _most(options)
                met.append(most._replace(alternatives=sum(option.alternatives for option in options)))
        return _Weight(
            min(sum(part.patterns for part in met), 2 * MAX_PATTERNS),  # no further than is needed to say no
            min(math.prod(part.alternatives for part in met), 2 * MAX_ALTERNATIVES),
            min(math.prod(part.multiple for part in met), 2 * MAX_MULTIPLE),
        )

    def _most(self, nodes: Iterable[Any]) -> _Weight:
        return _most([_Weight(), *map(self.weigh, nodes)])

    def _of_ref(self, ref: str) -> _Weight:
        target = self._resolve(ref)
        if id(target) not in self._of_targets:
            self._of_targets[id(target)] = _Weight()  # for references to it within it
            self._of_targets[id(target)] = self.weigh(target)
        return self._of_targets[id(target)]

    def _resolve(self, ref: str) -> Any:
        node: Any = self._root
        if ref != "#" and not ref.startswith("#/"):
            raise self._refuse(f"the reference {ref[:100]!r} does not lead to a place in the schema itself (#/…)")
        for step in unquote(ref).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdecimal() and len(name) < 10 and int(name) < len(node):
                node = node[int(name)]
            elif isinstance(node, dict) and name in node:
                node = node[name]
            else:
                raise self._refuse(f"the reference {ref[:100]!r} leads nowhere")
        return node

    def _refuse(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param}: {what}", param=self._param)


def _most(weights: list[_Weight]) -> _Weight:
    return _Weight(*map(max, zip(*weights, strict=True)))


def _multiple(value: Any) -> int:
    """The least whole number that is a multiple of `value`: 1 for 0.25, 5 for 2.5."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 1
    return min(abs(Fraction(str(value)).numerator), 2 * MAX_MULTIPLE) or 1


def _children(node: Mapping[str, Any]) -> list[Any]:
    children = [*_values(node, "properties"), *(node[name] for name in _CHILDREN if name in node)]
    return children + [item for name in _CHILD_LISTS for item in _items(node, name)]


def _values(node: Mapping[str, Any], name: str) -> list[Any]:
    values = node.get(name)
    return list(values.values()) if isinstance(values, dict) else []


def _items(node: Mapping[str, Any], name: str) -> list[Any]:
    items = node.get(name)
    return items if isinstance(items, list) else []

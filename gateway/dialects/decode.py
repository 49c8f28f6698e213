"""From a body's bytes to a dialect's fields, and what is told of bytes that are none: the field, the fault, what to do.

Knows JSON and msgspec's messages, no dialect.
"""

import re
from typing import TypeVar

import msgspec

from gateway.errors import InvalidRequest, cut

T = TypeVar("T")

# Matched as a whole against texts of at most _MAX_CHARS: what a client wrote may stand in them, of any length.
_PATH = re.compile(r"(?P<key>`key` in )?`\$\.?(?P<path>[^`]*?)(?P<value>\[\.\.\.\])?`")
_FIELD = re.compile(r"Object (?:(?P<missing>missing required)|contains unknown) field `(?P<name>.*)", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]*)`(?P<bound>[^`]*?)(?:, got `(?P<got>[^`]*)`)?")
_MAX_CHARS = 300
_KINDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_BYTE = re.compile(r" \(byte (\d+)\)$")
_NAME_BEFORE = re.compile(rb'"(?P<name>\w{1,64})"\s{0,16}:\s{0,16}$')
_NOT_A_NUMBER = re.compile(rb"[-+]?(?:NaN|Infinity)\b")
_HALF_PAIR_AT_END = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}.{0,5}$", re.DOTALL)


def decode(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Raises InvalidRequest; `param` is the path of the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise _wrong_json(str(error), body) from None
    except UnicodeDecodeError:
        raise _invalid("the body is not valid JSON: it is not UTF-8") from None
    except RecursionError:
        raise _invalid("the body is not valid JSON: nested too deeply") from None


def _wrong_field(text: str) -> InvalidRequest:
    """What msgspec says of a value, in a client's words."""
    before, _, behind = text.rpartition(" - at ")
    place = _PATH.fullmatch(behind) if before and len(behind) <= _MAX_CHARS else None
    path = place["path"] if place else ""
    told = cut(before if place else text, _MAX_CHARS)
    if field := _FIELD.fullmatch(told):
        name = cut(field["name"].removesuffix("`"))
        name = f"{path}.{name}" if path else name
        told = "is missing; give it" if field["missing"] else "is not known to this server; leave it out"
        return InvalidRequest(f"{name} {told}", param=name)
    if expected := _EXPECTED.fullmatch(told):
        told = f"must be {_in_words(expected['kinds'])}{expected['bound']}"
        told += f", not {_in_words(expected['got'])}" if expected["got"] else ""
    else:
        told = f"is wrong: {told[:1].lower()}{told[1:]}"
    part = ("a key of " if place["key"] else "a value of " if place["value"] else "") if place else ""
    return InvalidRequest(f"{part}{path or 'the body'} {told}", param=path or None)


def _in_words(kinds: str) -> str:
    """`str | array | null` as "a string or a list": a value that may be null may be left out."""
    names = kinds.split(" | ")
    words = [_KINDS.get(name, name) for name in names if name != "null" or len(names) == 1]
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _wrong_json(text: str, body: bytes) -> InvalidRequest:
    if not body.strip():
        return _invalid("the body is empty; send a JSON object")
    byte = _BYTE.search(text)
    at = int(byte[1]) if byte else len(body)
    at -= body[at - 1 : at] == b"-"
    if value := _NOT_A_NUMBER.match(body, at):  # what some clients make of no value
        before = _NAME_BEFORE.search(body[max(0, at - 100) : at])
        name = before["name"].decode() if before else None
        told = f"{name or f'a value at byte {at}'} is {value[0].decode()}, which JSON does not have"
        return _invalid(f"{told}; leave it out or give another value", param=name)
    if "surrogate" in text or ("truncated" in text and _HALF_PAIR_AT_END.search(body[-16:])):
        where = f" at byte {byte[1]}" if byte else " at its end"
        told = f"the body is not valid JSON: an escape{where} is half of a surrogate pair (\\ud800 to \\udfff)"
        return _invalid(f"{told}; give both halves, or the character itself")
    if "truncated" in text:
        return _invalid("the body is not valid JSON: it ends too early")
    return _invalid(f"the body is not valid JSON: {text.removeprefix('JSON is malformed: ')}")


def _invalid(text: str, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(text, param=param, code="invalid_json")

"""What dialects share in reading a body: fields that are refused by name, and texts in all their forms."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.errors import InvalidRequest, cut
from gateway.tasks import Text

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Texts = str | list[str | TokenId | list[TokenId]]

_NAMES: "msgspec.json.Decoder[dict[str, Raw]]" = msgspec.json.Decoder(dict[str, Raw])


def refuse_unsupported(body: Any, names: tuple[str, ...]) -> None:
    """Fields other servers know and this one does not: refused by name, not ignored. Raises InvalidRequest."""
    for name in names:
        value = getattr(body, name)
        if value is not msgspec.UNSET and bytes(value) != b"null":
            raise InvalidRequest(
                f"{name} is not supported by this server; leave it out", param=name, code="unsupported"
            )


def refuse_unknown(kind: type[Struct], body: bytes) -> None:
    """Fields that `kind` does not have: refused by name unless null. `body` is a valid one of that kind.

    For requests in which a field that is ignored would change the answer. Raises InvalidRequest.
    """
    for name, value in _NAMES.decode(body).items():
        if name not in kind.__struct_encode_fields__ and bytes(value) != b"null":
            text = f"{cut(name)} is not supported by this server; leave it out"
            raise InvalidRequest(text, param=cut(name), code="unsupported")


def read_texts(field: str, value: Texts) -> list[Text]:
    """A string, a list of strings, token ids, or a list of token ids, as a list. Raises InvalidRequest."""
    if isinstance(value, str):
        if not value:
            raise InvalidRequest(f"{field} is an empty string; put some text in", param=field)
        return [value]
    if not value:
        raise InvalidRequest(f"{field} is empty; give at least one text", param=field)
    if isinstance(value[0], int):
        _check_uniform(field, value, int)
        return [value]  # type: ignore[list-item]  # just checked
    kind = type(value[0])
    _check_uniform(field, value, kind)
    if not all(value):
        i = next(i for i, item in enumerate(value) if not item)
        _check_text(f"{field}[{i}]", value[i])  # type: ignore[arg-type]  # strings or lists, as just checked
    return value  # type: ignore[return-value]  # just checked


def _check_uniform(field: str, values: list[Any], kind: type) -> None:
    if set(map(type, values)) != {kind}:
        i = next(i for i, value in enumerate(values) if type(value) is not kind)
        text = f"{field} mixes types: {field}[0] is {_name(kind)}, {field}[{i}] is {_name(type(values[i]))}"
        raise InvalidRequest(text, param=f"{field}[{i}]")


def _check_text(name: str, text: Text) -> None:
    if not text:
        what = "an empty string" if isinstance(text, str) else "an empty list of token ids"
        raise InvalidRequest(f"{name} is {what}; leave it out or put something in", param=name)


def _name(kind: type) -> str:
    return {str: "a string", int: "a token id", list: "a list of token ids"}[kind]

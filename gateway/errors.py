"""What can go wrong for a client: one exception per kind, and the one table from kind to status, type and code.

Every body is JSON in OpenAI's error shape. A message says what was wrong, where, and what to do.
"""

import orjson
from msgspec import Struct

from ipc.submit import Rejected


def cut(text: str, num_chars: int = 100) -> str:
    """A client's text as an error repeats it: no more of it than tells which one it is."""
    return text if len(text) <= num_chars else text[: num_chars - 1] + "…"


class GatewayError(Exception):
    """Base of all errors a client is told about.

    `param` names the field at fault, as `input[3]`; where only the sequence is known, `index` is its place in
    the request until somebody who knows the fields names it. `code` is a finer one than the table's.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        index: int | None = None,
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.index = index
        self.retry_after_ms = retry_after_ms


class InvalidRequest(GatewayError):
    """Malformed, of the wrong type, or out of range."""


class UnknownModel(GatewayError):
    """No model of that name is served here."""


class UnknownRoute(GatewayError):
    """No such path."""


class MethodNotAllowed(GatewayError):
    """The path exists, the method does not."""


class SlowRequest(GatewayError):
    """The body did not arrive in time."""


class TooLarge(GatewayError):
    """Body, number of items or number of tokens beyond the limit."""


class UnsupportedMedia(GatewayError):
    """A body that is not plain JSON."""


class BadExpectation(GatewayError):
    """An Expect header other than 100-continue."""


class Quarantined(GatewayError):
    """This input has ended ranks; it is refused for a while."""


class Overloaded(GatewayError):
    """Too much is waiting already."""


class NonFiniteOutput(GatewayError):
    """The model gave NaN or infinity for an input."""


class InternalError(GatewayError):
    """A fault of ours."""


class NotReady(GatewayError):
    """No replica of the model can answer now."""


class DeadlineExceeded(GatewayError):
    """The request's deadline passed."""


class Kind(Struct, frozen=True):
    status: int
    type: str
    code: str


KINDS: dict[type[GatewayError], Kind] = {
    InvalidRequest: Kind(400, "invalid_request_error", "invalid_value"),
    UnknownModel: Kind(404, "invalid_request_error", "model_not_found"),
    UnknownRoute: Kind(404, "invalid_request_error", "unknown_route"),
    MethodNotAllowed: Kind(405, "invalid_request_error", "method_not_allowed"),
    SlowRequest: Kind(408, "invalid_request_error", "request_timeout"),
    TooLarge: Kind(413, "invalid_request_error", "request_too_large"),
    UnsupportedMedia: Kind(415, "invalid_request_error", "unsupported_media_type"),
    BadExpectation: Kind(417, "invalid_request_error", "expectation_failed"),
    Quarantined: Kind(422, "invalid_request_error", "request_quarantined"),
    NonFiniteOutput: Kind(422, "invalid_request_error", "non_finite_output"),  # the same again gives the same
    Overloaded: Kind(429, "rate_limit_error", "overloaded"),
    InternalError: Kind(500, "server_error", "internal_error"),
    NotReady: Kind(503, "server_error", "not_ready"),
    DeadlineExceeded: Kind(504, "timeout_error", "deadline_exceeded"),
}


def kind_of(error: GatewayError) -> Kind:
    return KINDS[type(error)]


def render_error(error: GatewayError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`."""
    kind = kind_of(error)
    body = {"message": error.message, "type": kind.type, "param": error.param, "code": error.code or kind.code}
    return orjson.dumps({"error": body})


def error_headers(error: GatewayError) -> dict[str, str]:
    """Retry-After (whole seconds, at least one) for what is worth trying again."""
    if isinstance(error, Overloaded | NotReady):
        return {"Retry-After": str(max(1, -(-error.retry_after_ms // 1000)))}
    return {}


def from_rejected(message: Rejected, first: int) -> GatewayError:
    """What a scheduler's refusal means to a client. `first` is the place of the chunk's first input in the request."""
    index = None if message.index is None else first + message.index
    retry = message.retry_after_ms or 1000
    match message.code:
        case "full":
            return Overloaded("too many requests are waiting; try again later", retry_after_ms=retry)
        case "expired":
            return DeadlineExceeded("the request's deadline passed before it was computed")
        case "quarantined":
            text = "this input has ended the processes that computed it and is refused for a while"
            return Quarantined(text, index=index)
        case "invalid":
            return InvalidRequest(message.message, index=index)
        case "non_finite":
            text = "the model gave a value that is not finite for this input; leave it out or change it"
            return NonFiniteOutput(text, index=index)
        case "out_of_memory":
            text = f"not enough memory to compute this input: {message.message}"
            return TooLarge(text, index=index, code="out_of_memory")
        case "lost":
            text = "the replicas that worked on this were lost; try again later"
            return NotReady(text, code="replica_lost", retry_after_ms=retry)
        case _:
            return NotReady("no replica could take this; try again later", retry_after_ms=retry)

"""Bounds on what a request may be, checked from the cheapest on: place, headers, body, items, characters, tokens."""

import asyncio

from aiohttp import web

from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, Overloaded, SlowRequest, TooLarge, UnsupportedMedia
from gateway.tasks import GenerateTask, Text, place
from ipc.types import Priority

MAX_TIMEOUT_MS = 3_600_000
MAX_CHARS_PER_TOKEN = 250  # of one text that must not be cut: beyond, it is too long whatever the tokenizer
MEAN_CHARS_PER_TOKEN = 16  # of a whole request: real text has four or five
# In a body: decoding holds up everybody, about 0.3 s at these numbers. Texts may have such characters, too.
MAX_BRACKETS = 1_000_000
MAX_QUOTES = 4_000_000
RETRY_AFTER_MS = 1000
TRUNCATE_HINT = "shorten it or set truncate to true"
MAX_ID_CHARS = 128


class Admission:
    """How many requests are worked on at a time; `with` it around each, before anything is encoded."""

    def __init__(self, limit: int, whose: str) -> None:
        """`whose` requests they are, for who is refused."""
        self._limit, self._whose = limit, whose
        self.in_use = 0

    def __enter__(self) -> None:
        """Raises Overloaded."""
        if self.in_use >= self._limit:
            text = f"this gateway process has its {self._limit} requests {self._whose} (max_concurrent_requests)"
            raise Overloaded(f"{text}; try again later", retry_after_ms=RETRY_AFTER_MS)
        self.in_use += 1

    def __exit__(self, *_: object) -> None:
        self.in_use -= 1


async def read_body(request: web.BaseRequest, config: GatewayConfig) -> bytes:
    """Raises UnsupportedMedia, TooLarge, SlowRequest."""
    _check_media(request)
    content = request.content
    try:
        if content.is_eof():  # came together with the head, as small ones do
            body = content.read_nowait()
        elif (request.content_length or 0) > config.max_body_bytes:
            raise _body_too_large(config)
        else:
            async with asyncio.timeout(config.body_timeout_ms / 1000):
                body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _body_too_large(config) from None
    except web.RequestPayloadError:
        raise InvalidRequest("the body is not what its headers say", code="bad_http") from None
    except TimeoutError:
        raise SlowRequest(f"the body did not arrive within {config.body_timeout_ms} ms; send it faster") from None
    if len(body) > config.max_body_bytes:
        raise _body_too_large(config)
    if len(body) > MAX_BRACKETS and (body.count(b"[") > MAX_BRACKETS or body.count(b'"') > MAX_QUOTES):
        raise TooLarge(
            "the body has more lists or strings than a request may have; send it in parts", code="too_many_values"
        )
    return body


def _check_media(request: web.BaseRequest) -> None:
    headers = request.headers
    media = headers.get("Content-Type")
    if media is not None and media != "application/json":
        essence = media.partition(";")[0].strip().lower()
        if essence != "application/json" and not (essence.startswith("application/") and essence.endswith("+json")):
            raise UnsupportedMedia(f"Content-Type is {media[:100]!r}; send application/json", param="Content-Type")
    encoding = headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        text = f"Content-Encoding is {encoding[:100]!r}; send the body uncompressed"
        raise UnsupportedMedia(text, param="Content-Encoding")
    coding = headers.get("Transfer-Encoding")
    if coding is not None and coding.strip().lower() != "chunked":
        text = f"Transfer-Encoding is {coding[:100]!r}; it may only be chunked, with the body uncompressed"
        raise UnsupportedMedia(text, param="Transfer-Encoding")
    if "Upgrade" in headers:
        raise InvalidRequest("this server speaks HTTP/1.1 only; leave out the Upgrade header", param="Upgrade")


def _body_too_large(config: GatewayConfig) -> TooLarge:
    return TooLarge(f"the body is larger than {config.max_body_bytes} bytes; send it in parts", code="body_too_large")


def timeout_ms(request: web.BaseRequest, usual_ms: int) -> int:
    """The request's time in all: X-Timeout-Ms, or the usual one. Raises InvalidRequest."""
    value = request.headers.get("X-Timeout-Ms")
    if value is None:
        return usual_ms
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 0 < int(value) <= MAX_TIMEOUT_MS):
        text = f"X-Timeout-Ms is {value[:20]!r}; give whole milliseconds from 1 to {MAX_TIMEOUT_MS}"
        raise InvalidRequest(text, param="X-Timeout-Ms")
    return int(value)


def priority(request: web.BaseRequest) -> Priority:
    """X-Priority: `interactive` (default) or `bulk`. Raises InvalidRequest."""
    match request.headers.get("X-Priority"):
        case None | "interactive":
            return "interactive"
        case "bulk":
            return "bulk"
        case value:
            text = f"X-Priority is {value[:20]!r}; it may be interactive or bulk"
            raise InvalidRequest(text, param="X-Priority")


def request_id(request: web.BaseRequest) -> str | None:
    """The client's X-Request-Id as it is echoed, if it gave one that can be."""
    value = request.headers.get("X-Request-Id")
    return None if value is None or not (value.isascii() and value.isprintable()) else value[:MAX_ID_CHARS]


def check_choices(task: GenerateTask, config: GatewayConfig) -> None:
    """Raises InvalidRequest."""
    if task.num_choices > config.max_choices:
        param = "n" if task.n > 1 else "prompt"
        text = f"{param} makes it {task.num_choices} generations; at most {config.max_choices} are allowed in a request"
        raise InvalidRequest(text, param=param)
    if len(task.stop) > config.max_stop_strings:
        text = f"stop has {len(task.stop)} strings; at most {config.max_stop_strings} are allowed"
        raise InvalidRequest(text, param="stop")


def check_items(field: str, num_items: int, config: GatewayConfig) -> None:
    if num_items > config.max_items:
        text = f"{field} has {num_items} items; at most {config.max_items} are allowed in one request"
        raise TooLarge(text, param=field, code="too_many_items")


def check_chars(
    field: str, texts: list[Text], max_tokens: int, truncate: bool, config: GatewayConfig, hint: str = TRUNCATE_HINT
) -> int:
    """How many characters are to be encoded. Refuses what is too much by that, or by token ids, alone.

    Raises TooLarge.
    """
    one = MAX_CHARS_PER_TOKEN * max_tokens
    cut = MEAN_CHARS_PER_TOKEN * max_tokens  # about what truncation leaves to be encoded
    total = num_ids = 0
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            num_ids += min(len(text), max_tokens) if truncate else len(text)
            continue
        if len(text) > one and not truncate:
            message = (
                f"{place(field, i)} has {len(text)} characters, far more than the {max_tokens} tokens the model takes; "
                f"{hint}"
            )
            raise TooLarge(message, param=place(field, i), code="text_too_long")
        total += min(len(text), cut) if truncate else len(text)
    if total > MEAN_CHARS_PER_TOKEN * config.max_request_tokens:
        limit = config.max_request_tokens
        message = f"{field} has {total} characters in all, more than fit the {limit} tokens allowed; split the request"
        raise TooLarge(message, param=field, code="too_many_tokens")
    check_tokens(num_ids, config)
    return total


def check_tokens(num_tokens: int, config: GatewayConfig) -> None:
    if num_tokens > config.max_request_tokens:
        text = f"the request has {num_tokens} tokens; at most {config.max_request_tokens} are allowed, split it"
        raise TooLarge(text, code="too_many_tokens")

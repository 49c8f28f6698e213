"""Around every handler: the request's id, errors as JSON, counting. And JSON for what fails before any handler."""

import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.errors import (
    GatewayError,
    InternalError,
    InvalidRequest,
    UnknownRoute,
    error_headers,
    kind_of,
    render_error,
)
from gateway.limits import request_id
from gateway.state import GATEWAY
from gateway.stream import EVENTS, EventStream


def request_middleware(log: Callable[..., None]) -> Middleware:
    """The one middleware. `log` gets our own faults, never a client's text."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        gateway = request.app[GATEWAY]
        metrics = gateway.metrics
        start = time.perf_counter()
        metrics.in_flight += 1
        told: GatewayError | None = None
        try:
            response = await handler(request)
        except GatewayError as error:
            told, response = error, await _tell(request, error)
        except web.HTTPException as error:  # aiohttp's own, for targets that are no path
            kind = UnknownRoute if error.status == 404 else InvalidRequest
            response = error_response(kind(f"cannot serve this request: {error.reason}"))
        except ConnectionError:
            raise  # the client is gone, nobody to tell
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this request only
            log("request_failed", level="error", route=_route(request), error=type(error).__name__, where=_where(error))
            told = InternalError("the server made an error; it has been logged")
            response = await _tell(request, told)
        finally:
            metrics.in_flight -= 1
        response.headers.update(request_id(request))
        if gateway.draining:
            response.force_close()
        status = response.status if told is None else kind_of(told).status  # a stream's is 200 even if it fails later
        metrics.count_request(_route(request), status, time.perf_counter() - start)
        return response

    return middleware


async def _tell(request: web.Request, error: GatewayError) -> web.StreamResponse:
    """The error as the answer, or as the last event of an answer that has begun."""
    begun: EventStream | None = request.get(EVENTS)
    if begun is None:
        return error_response(error)
    await begun.fail(error)
    return begun.response


def error_response(error: GatewayError) -> web.Response:
    headers = {"Content-Type": "application/json"} | error_headers(error)
    return web.Response(status=kind_of(error).status, body=render_error(error), headers=headers)


class JsonRequestHandler(web.RequestHandler):
    """aiohttp's connection, with its own error pages (bad HTTP, mostly) in our shape."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            text = (message or "bad HTTP request").partition("\n")[0].rstrip(":")
            response = error_response(InvalidRequest(f"not a valid HTTP request: {text}", code="bad_http"))
        else:
            response = error_response(InternalError("the server made an error"))
        response.force_close()
        return response


def _route(request: web.Request) -> str:
    """The route's pattern, not the client's path: bounded, and no text of a client in the metrics."""
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical


def _where(error: Exception) -> str:
    """Innermost file and line, without any value."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"

"""Around every handler: which one it is, the request's id, errors as JSON, counting."""

import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from msgspec import Struct

from gateway.answer import Answer, error_answer
from gateway.errors import BadExpectation, GatewayError, InternalError, MethodNotAllowed, UnknownRoute, kind_of
from gateway.limits import request_id
from gateway.state import Gateway
from gateway.stream import EVENTS, EventStream

Handler = Callable[[Gateway, web.BaseRequest], Awaitable[web.StreamResponse]]
UNKNOWN = "/{path}"  # in the metrics: no text of a client
ANYTHING = "{name}"  # at the end of a route: any text that is not empty, slashes and all


class Route(Struct, frozen=True):
    """The handler of one path, for one method. GET allows HEAD, too."""

    method: str
    handler: Handler


class Front:
    """Call it with every request. `log` gets our own faults, never a client's text."""

    def __init__(self, gateway: Gateway, routes: dict[str, Route], log: Callable[..., None]) -> None:
        self._gateway = gateway
        self._methods = {path: route.method for path, route in routes.items()}
        self._handlers = {(route.method, path): route.handler for path, route in routes.items()}
        self._handlers |= {("HEAD", path): route.handler for path, route in routes.items() if route.method == "GET"}
        self._open = [(path.removesuffix(ANYTHING), path) for path in routes if path.endswith(ANYTHING)]
        self._log = log

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        start = time.perf_counter()
        gateway, metrics = self._gateway, self._gateway.metrics
        path = self._route(request.rel_url.path_safe)
        handler = self._handlers.get((request.method, path))
        route = UNKNOWN if handler is None else path
        told: GatewayError | None = None
        metrics.in_flight += 1
        try:
            if request.headers.get("Expect"):
                await _meet_expectation(request)
            if handler is None:
                response: web.StreamResponse = _no_route(request, self._methods.get(path))
            else:
                response = await handler(gateway, request)
        except GatewayError as error:
            told, response = error, await _tell(request, error)
        except ConnectionError:
            raise  # the client is gone, nobody to tell
        except Exception as error:  # noqa: BLE001 - a fault of ours ends this request only
            self._log("request_failed", level="error", route=route, error=type(error).__name__, where=_where(error))
            told = InternalError("the server made an error; it has been logged")
            response = await _tell(request, told)
        finally:
            metrics.in_flight -= 1
        if (given := request_id(request)) is not None:
            response.headers["X-Request-Id"] = given
        if gateway.draining:
            response.force_close()
        status = response.status if told is None else kind_of(told).status  # a stream's is 200 even if it fails later
        metrics.count_request(route, status, time.perf_counter() - start)
        return response

    def _route(self, path: str) -> str:
        """The route that `path` belongs to, or `path`."""
        if path in self._methods:
            return path
        return next((route for start, route in self._open if path.startswith(start) and path != start), path)


def _no_route(request: web.BaseRequest, allowed: str | None) -> Answer:
    """405 for a path that takes the method `allowed`. Raises UnknownRoute for any other path."""
    if allowed is None:
        raise UnknownRoute(f"no such path: {request.path[:200]}")
    text = f"{request.path[:200]} takes {allowed}, not {request.method[:20]}"
    answer = error_answer(MethodNotAllowed(text))
    answer.headers["Allow"] = allowed
    return answer


async def _meet_expectation(request: web.BaseRequest) -> None:
    """Answers `Expect: 100-continue`. Raises BadExpectation for any other expectation."""
    if request.version == (1, 1):
        if request.headers["Expect"].lower() != "100-continue":
            raise BadExpectation("Expect may only be 100-continue", param="Expect")
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def _tell(request: web.BaseRequest, error: GatewayError) -> web.StreamResponse:
    """The error as the answer, or as the last event of an answer that has begun."""
    begun: EventStream | None = request.get(EVENTS)
    if begun is None:
        return error_answer(error)
    await begun.fail(error)
    return begun.response


def _where(error: Exception) -> str:
    """Innermost file and line, without any value."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"

"""A server of /v1/completions that streams a token every few milliseconds, and some ways of getting it wrong."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

GAP_S = 0.01


class FakeStreams:
    """`fault`: none, refuse, error (an event in mid-stream), cut (the connection), short (a token too few)."""

    def __init__(self, fault: str = "none") -> None:
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fault == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=429)
        if not body.get("stream"):
            return web.json_response({"choices": [{"index": 0, "text": f"after {len(body['prompt'])}"}]})
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._stream(request, body["max_tokens"])
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, num_tokens: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(num_tokens - (self.fault == "short")):
            await asyncio.sleep(GAP_S)
            if self.fault == "cut" and index == 1:
                assert request.transport is not None
                request.transport.close()
                break
            if self.fault == "error" and index == 1:
                await response.write(b'data: {"error": {"message": "lost"}}\n\n')
            await response.write(_event({"choices": [{"index": 0, "text": "x"}], "usage": None}))
        count = num_tokens - (self.fault == "short")
        await response.write(_event({"choices": [], "usage": {"completion_tokens": count}}))
        await response.write(b"data: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"

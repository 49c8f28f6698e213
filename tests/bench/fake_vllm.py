"""Stands for the peer's server: its routes and answers, in front of another server that computes.

python -m tests.bench.fake_vllm --port 8301 --model embed --behind http://127.0.0.1:8300
"""

import argparse
import sys

import aiohttp
from aiohttp import web

from bench.peers import HttpSetup
from bench.peers.bouquet import PORT
from bench.peers.vllm import Vllm
from bench.servers import ServerSpec


class FakeVllm(Vllm):
    """The same ports, names and endpoints; other commands."""

    def servers(self, setup: HttpSetup) -> list[ServerSpec]:
        return [
            ServerSpec(
                name=spec.name,
                command=[sys.executable, "-m", "tests.bench.fake_vllm", "--port", str(spec.port)]
                + ["--model", spec.name.rpartition("-")[2], "--behind", f"http://127.0.0.1:{PORT}"],
                port=spec.port,
                ready_path=spec.ready_path,
                settings="fake",
            )
            for spec in super().servers(setup)
        ]


def one() -> FakeVllm:
    return FakeVllm("vllm", (8301, 8302), ())


def four() -> FakeVllm:
    return FakeVllm("vllm-api4", (8303, 0), (), scores=False)


def defaults() -> FakeVllm:
    return FakeVllm("vllm-default", (8305, 0), (), scores=False)


def make_app(model: str, behind: str) -> web.Application:
    """/v1/embeddings passes on; /classify asks for scores and answers as the peer does."""

    async def ask(request: web.Request, path: str, body: object) -> aiohttp.ClientResponse:
        session: aiohttp.ClientSession = request.app[SESSION]
        return await session.post(behind + path, json=body)

    async def embeddings(request: web.Request) -> web.Response:
        answer = await ask(request, "/v1/embeddings", await request.json())
        return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    async def classify(request: web.Request) -> web.Response:
        body = await request.json()
        answer = await ask(request, "/v1/score", {"model": body["model"], "pairs": body["input"]})
        if answer.status != 200:
            return web.Response(body=await answer.read(), status=answer.status)
        data = [
            {"index": row["index"], "label": None, "probs": [row["score"]], "num_classes": 1}
            for row in (await answer.json())["data"]
        ]
        return web.json_response({"object": "list", "data": data})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def session(app: web.Application):  # type: ignore[no-untyped-def]
        async with aiohttp.ClientSession() as opened:
            app[SESSION] = opened
            yield

    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(session)
    app.router.add_get("/health", health)
    app.router.add_post(*(("/classify", classify) if model == "score" else ("/v1/embeddings", embeddings)))
    return app


SESSION = web.AppKey("session", aiohttp.ClientSession)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for option in ("--port", "--model", "--behind"):
        parser.add_argument(option, required=True)
    given = parser.parse_args()
    web.run_app(make_app(given.model, given.behind), host="127.0.0.1", port=int(given.port), print=None)

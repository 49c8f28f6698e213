"""vLLM 0.22.0 over HTTP, as its own documentation has it started for embeddings and for Qwen3's reranker.

Variants: one API server, four, and one with prefix caching left on as it is by default. Never imported here: it runs
in processes of its own, from `peer_site` where its packages are not installed.
"""

import json
import sys

from bench.peers import Endpoint, HttpSetup
from bench.servers import ServerSpec

VERSION = "0.22.0"
GIB = 1 << 30
MAX_MODEL_LEN = 8192  # as ours
# several servers share one GPU: each takes what it needs instead of nine tenths. A step holds 8,192 tokens of 112 KiB.
MEMORY = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(8 * GIB)]
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
COMPILING = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # at the start alone; several servers start together
WITHOUT = ("PYTHONPATH", "FLASHINFER_DISABLE_JIT", "FLASHINFER_WORKSPACE_BASE")  # ours


class Vllm:
    """One variant: an embedding server and, unless it is the one with defaults, a scoring one."""

    def __init__(self, name: str, ports: tuple[int, int], options: tuple[str, ...], *, scores: bool = True) -> None:
        self.name = name
        self.label = f"vllm-{VERSION}"
        self._ports = ports
        self._options = list(options)
        self._scores = scores

    def servers(self, setup: HttpSetup) -> list[ServerSpec]:
        specs = [self._server(setup, f"{self.name}-embed", "embed", self._ports[0], [])]
        if self._scores:
            overrides = ["--hf-overrides", json.dumps(RERANKER)]
            specs.append(self._server(setup, f"{self.name}-score", "score", self._ports[1], overrides))
        return specs

    def endpoint(self) -> Endpoint:
        embed, score = (f"http://127.0.0.1:{port}" for port in self._ports)
        return Endpoint(self.name, self.label, embed, score if self._scores else "", "/classify", "input")

    def _server(self, setup: HttpSetup, name: str, model: str, port: int, more: list[str]) -> ServerSpec:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setup.models / model)]
        options = ["--runner", "pooling", "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
        options += ["--disable-uvicorn-access-log", *MEMORY, *self._options, *more]
        environment = QUIET | COMPILING | {"VLLM_CACHE_ROOT": str(setup.state / "vllm-cache")}
        if setup.peer_site is not None:
            environment["PYTHONPATH"] = str(setup.peer_site)
        return ServerSpec(
            name=name,
            command=[*command, "--served-model-name", model, "--host", "127.0.0.1", "--port", str(port), *options],
            port=port,
            ready_path="/health",
            environment=environment,
            without=WITHOUT,
            settings=" ".join(options),
        )


def one_api_server() -> Vllm:
    return Vllm("vllm", (8301, 8302), ("--no-enable-prefix-caching",))


def four_api_servers() -> Vllm:
    options = ("--no-enable-prefix-caching", "--api-server-count", "4")
    return Vllm("vllm-api4", (8303, 0), options, scores=False)  # scoring is one request at a time


def defaults() -> Vllm:
    return Vllm("vllm-default", (8305, 0), (), scores=False)

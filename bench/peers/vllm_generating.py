"""vLLM 0.22.0 with one language model, over HTTP; prefix caching off, as no two prompts begin alike.

Never imported here: it runs in a process of its own, from `peer_site` where its packages are not installed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bench.load import LoadResult
from bench.peers import GeneratingSetup
from bench.peers.vllm import COMPILING, QUIET, VERSION, WITHOUT
from bench.servers import ServerSpec, running
from bench.streams import complete, stream_prompts

PORT = 8307
READY_S = 400.0


class VllmGenerating:
    name = "vllm"
    label = f"vllm-{VERSION}"

    @contextmanager
    def launch(self, setup: GeneratingSetup) -> Iterator[None]:
        with running([self.server(setup)], setup.state, READY_S) as servers:
            self._url, self._model = servers[0].url, setup.model
            yield

    def server(self, setup: GeneratingSetup) -> ServerSpec:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(setup.model_dir)]
        command += ["--served-model-name", setup.model, "--host", "127.0.0.1", "--port", str(PORT)]
        options = ["--dtype", "bfloat16", "--max-model-len", str(setup.max_model_len), "--disable-uvicorn-access-log"]
        options += ["--no-enable-prefix-caching", "--gpu-memory-utilization", str(setup.memory_fraction)]
        environment = QUIET | COMPILING | {"VLLM_CACHE_ROOT": str(setup.state / "vllm-cache")}
        if setup.peer_site is not None:
            environment["PYTHONPATH"] = str(setup.peer_site)
        return ServerSpec(
            name=self.name,
            command=[
                *command,
                "--served-model-name",
                setup.model,
                "--host",
                "127.0.0.1",
                "--port",
                str(PORT),
                *options,
            ],
            port=PORT,
            ready_path="/health",
            environment=environment,
            without=WITHOUT,
            settings=" ".join(options),
        )

    def generate(self, prompts: list[list[int]], num_tokens: int, in_flight: int, num_warmup: int) -> LoadResult:
        return stream_prompts(self._url, self._model, prompts, num_tokens, in_flight, num_warmup)

    def complete(self, prompt: list[int], num_tokens: int) -> str:
        return complete(self._url, self._model, prompt, num_tokens)

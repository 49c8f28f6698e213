"""Our own stack over HTTP with the models of bench.random_model, one replica each, on one device."""

import os
import sys
from pathlib import Path

from bench.peers import Endpoint, HttpSetup
from bench.random_model import KINDS
from bench.servers import ServerSpec

PORT = 8300
CONFIG = """\
run_dir = "{run_dir}"

{models}
[gateway]
port = {port}
num_gateways = {num_gateways}
max_request_tokens = 500000  # 100 x 4096 in one request
spin_us = {spin_us}

[scheduler]
spin_us = {spin_us}

[rank]
device = "{device}"
max_model_len = {max_model_len}
spin_us = {spin_us}
"""
MODEL = """\
[[models]]
name = "{name}"
source = "{source}"
memory_fraction = 0.15
scheduler = {{ listen = "tcp://127.0.0.1:{tcp_port}" }}
rank = {{ task = "{task}" }}

"""
TASKS = {"embed": "embed", "score": "score", "pplx": "embed"}


class Bouquet:
    """One stack; by default that of the four tables."""

    label = "bouquet"

    def __init__(
        self, name: str = "ours", port: int = PORT, models: dict[str, Path] | None = None, max_model_len: int = 8192
    ) -> None:
        self.name = name
        self._port = port
        self._models = models
        self._max_model_len = max_model_len

    def servers(self, setup: HttpSetup) -> list[ServerSpec]:
        """Writes the configuration beside the other state."""
        setup.state.mkdir(parents=True, exist_ok=True)
        num_cores = len(os.sched_getaffinity(0))
        models = self._models or {kind: setup.models / kind for kind in KINDS}
        tables = [
            MODEL.format(name=name, source=path, tcp_port=self._port + 20 + index, task=TASKS.get(name, "auto"))
            for index, (name, path) in enumerate(models.items())
        ]
        text = CONFIG.format(
            run_dir=self.run_dir(setup),
            models="".join(tables),
            port=self._port,
            num_gateways=max(1, min(4, num_cores // 2)),
            device=setup.device,
            max_model_len=self._max_model_len,
            spin_us=500 if num_cores >= 8 else 0,  # a rank that spins needs a core of its own
        )
        config = setup.state / f"{self.name}.toml"
        config.write_text(text)
        command = [sys.executable, "-m", "services.cli", "up", "--foreground", "--config", str(config)]
        settings = " ".join(text.partition("[gateway]")[2].split())
        return [ServerSpec(self.name, command, self._port, "/health/ready", settings=settings, stops_its_own=True)]

    def run_dir(self, setup: HttpSetup) -> Path:
        return setup.state / f"run-{self.name}"

    def endpoint(self) -> Endpoint:
        url = f"http://127.0.0.1:{self._port}"
        return Endpoint(self.name, self.label, url, url, "/v1/score", "pairs")

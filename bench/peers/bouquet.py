"""Our own stack over HTTP with the models of bench.random_model, one replica each, on one device."""

import os
import sys

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

[rank]
device = "{device}"
max_model_len = 8192
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
    name = "ours"
    label = "bouquet"

    def servers(self, setup: HttpSetup) -> list[ServerSpec]:
        """Writes the configuration beside the other state."""
        setup.state.mkdir(parents=True, exist_ok=True)
        num_cores = len(os.sched_getaffinity(0))
        text = CONFIG.format(
            run_dir=setup.state / "run",
            models="".join(
                MODEL.format(name=kind, source=setup.models / kind, tcp_port=PORT + 20 + index, task=TASKS[kind])
                for index, kind in enumerate(KINDS)
            ),
            port=PORT,
            num_gateways=max(1, min(4, num_cores // 2)),
            device=setup.device,
            spin_us=500 if num_cores >= 8 else 0,  # a rank that spins needs a core of its own
        )
        config = setup.state / "ours.toml"
        config.write_text(text)
        command = [sys.executable, "-m", "services.cli", "up", "--foreground", "--config", str(config)]
        settings = " ".join(text.partition("[gateway]")[2].split())
        return [ServerSpec(self.name, command, PORT, "/health/ready", settings=settings)]

    def endpoint(self) -> Endpoint:
        url = f"http://127.0.0.1:{PORT}"
        return Endpoint(self.name, self.label, url, url, "/v1/score", "pairs")

"""What a stack that has just become ready says: its URL and commands to paste."""

import json
from pathlib import Path

from ipc.addresses import replica_id
from services.config import ServiceConfig
from services.health import replica_status
from services.stack import url

QUESTION = "What is a tulip?"
QUERY = "Which planet is known as the Red Planet?"
DOCUMENTS = ["Venus is the hottest planet.", "Mars is called the Red Planet because of its rust."]


def greeting(config: ServiceConfig) -> str:
    base = url(config)
    lines = [f"Bouquet serves on {base}", ""]
    for model in config.models:
        status = replica_status(Path(config.run_dir), replica_id(model.name, 0))
        task = status.facts.task if status and status.facts else "embed"
        if task == "embed":
            lines += _curl(base, "/v1/embeddings", {"model": model.name, "input": ["Hello, world!"]})
        if task in ("embed", "score"):
            lines += _curl(base, "/v1/rerank", {"model": model.name, "query": QUERY, "documents": DOCUMENTS})
        if task == "generate":
            messages = [{"role": "user", "content": QUESTION}]
            body = {"model": model.name, "messages": messages, "max_tokens": 64, "temperature": 0, "stream": True}
            lines += _curl(base, "/v1/chat/completions", body, "-sN")
    return "\n".join([*lines, f"  curl -s {base}/v1/models", ""])


def _curl(base: str, path: str, body: dict[str, object], options: str = "-s") -> list[str]:
    data = json.dumps(body, ensure_ascii=False)
    return [f"  curl {options} {base}{path} -H 'Content-Type: application/json' \\", f"    -d '{data}'", ""]

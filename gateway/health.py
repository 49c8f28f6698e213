"""Liveness, readiness, the metrics page and the list of models: what is answered without any model's work."""

import json

from aiohttp import web

from gateway.answer import Answer
from gateway.dialects.openai import render_model, render_models
from gateway.encode import token_limit
from gateway.errors import NotReady
from gateway.metrics import render
from gateway.models import ServedModel
from gateway.state import Gateway
from ipc.control import ProcessStats

MODELS = "/v1/models/"


async def live(gateway: Gateway, request: web.BaseRequest) -> Answer:
    """200 as long as the loop turns; knows nothing of models."""
    return _status({"status": "live"})


async def ready(gateway: Gateway, request: web.BaseRequest) -> Answer:
    """200 when every model has a replica that is ready and has really computed something lately."""
    if gateway.draining:
        raise NotReady("this gateway is stopping", code="draining", retry_after_ms=1000)
    reasons = {name: reason for name in gateway.models if (reason := _why_not_ready(gateway, name))}
    if reasons:
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NotReady(f"not ready: {text}", retry_after_ms=1000)
    return _status({"status": "ready", "models": sorted(gateway.models)})


def _status(body: dict[str, object]) -> Answer:
    return Answer(json.dumps(body).encode(), {"Content-Type": "application/json; charset=utf-8"})


def _why_not_ready(gateway: Gateway, name: str) -> str | None:
    links = gateway.client.links()[name]
    if not links:
        return "no replica is configured"
    ready_links = [link for link in links if link.live and link.ready]
    if not ready_links:
        states = ", ".join(f"{link.replica} is {link.status.state if link.status else 'not reached'}" for link in links)
        return f"no replica is ready ({states})"
    if all(link.is_stale for link in ready_links):
        age = min(link.forward_age_ms for link in ready_links)
        if age == float("inf"):
            return "it has not finished a forward pass with finite values yet"
        return f"its last forward pass was {age / 1000:.0f} s ago"
    return None


async def metrics(gateway: Gateway, request: web.BaseRequest) -> Answer:
    """Every process's figures: this gateway's fresh, the others' as their schedulers last told them."""
    processes: list[ProcessStats] = []
    for links in gateway.client.links().values():
        for link in links:
            if link.status is not None:
                processes.extend(link.status.stats)
    processes.append(gateway.client.own_stats())
    return Answer(render(processes), {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def models(gateway: Gateway, request: web.BaseRequest) -> Answer:
    lengths = {name: _max_len(gateway, model) for name, model in sorted(gateway.models.items())}
    return Answer(render_models(lengths, gateway.started_at))


async def model(gateway: Gateway, request: web.BaseRequest) -> Answer:
    """One of them. Raises UnknownModel."""
    name = request.path.removeprefix(MODELS)
    return Answer(render_model(name, _max_len(gateway, gateway.model(name)), gateway.started_at))


def _max_len(gateway: Gateway, model: ServedModel) -> int | None:
    facts = gateway.client.known_facts(model.name)
    return model.max_seq_length if facts is None else token_limit(model, facts)

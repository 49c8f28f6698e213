"""Clients of /v1/completions that send token ids and keep what came: text, log probabilities, how it ended."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Told:
    """One stream, as far as it came."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    num_events: int = 0
    finish_reason: str | None = None
    num_tokens: int = 0  # as the server counts them
    error: dict[str, Any] | None = None  # an event in the stream, or a refusal


async def generate(
    session: aiohttp.ClientSession, url: str, model: str, prompt_ids: list[int], num_tokens: int, **fields: Any
) -> Told:
    """A greedy stream to its end; `on_event`, if given, is called after every event."""
    on_event: Callable[[Told], object] = fields.pop("on_event", lambda told: None)
    body = {"model": model, "prompt": prompt_ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "stream": True, "stream_options": {"include_usage": True}, **fields}
    told = Told()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            told.error = (await response.json())["error"]
            return told
        async for line in response.content:
            if line.startswith(b"data: {"):
                _take(told, json.loads(line[6:]))
                on_event(told)
    return told


def _take(told: Told, event: dict[str, Any]) -> None:
    told.num_events += 1
    if "error" in event:
        told.error = event["error"]
        return
    for choice in event["choices"]:
        told.text += choice["text"]
        told.logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        told.finish_reason = choice["finish_reason"] or told.finish_reason
    if event["usage"]:
        told.num_tokens = event["usage"]["completion_tokens"]


def metric(text: str, name: str, model: str) -> float:
    """A gauge or counter of the model's first scheduler, out of /metrics; NaN if there is none."""
    sample = rf'^bouquet_scheduler_{name}\{{[^}}]*replica="{model}/0"\}} (\S+)$'
    return float(found[1]) if (found := re.search(sample, text, re.M)) else float("nan")


async def wait_for_metric(
    session: aiohttp.ClientSession, url: str, name: str, model: str, wanted: Callable[[float], bool]
) -> float:
    """Until the metric is as wanted. Raises TimeoutError after 10 s, an AssertionError with its last value."""
    value = float("nan")
    try:
        async with asyncio.timeout(10):
            while True:
                async with session.get(f"{url}/metrics") as response:
                    value = metric(await response.text(), name, model)
                if wanted(value):
                    return value
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"{name} of {model} stays {value}") from None

"""Token-id prompts to a server's /v1/completions: streamed under load, or one whole for its text."""

import msgspec

from bench.client import Address, Connection, encode_request
from bench.load import LoadError, LoadResult, LoadSpec, run_one

MAX_SECONDS = 300.0
PATH = "/v1/completions"


def stream_prompts(
    url: str, model: str, prompts: list[list[int]], num_tokens: int, in_flight: int, num_warmup: int
) -> LoadResult:
    """Greedy streams of exactly `num_tokens` for each prompt but the first `num_warmup`. Raises LoadError."""
    bodies = [_body(model, prompt, num_tokens, stream=True).decode() for prompt in prompts]
    result = run_one(
        LoadSpec(
            url=url,
            path=PATH,
            bodies=bodies,
            concurrency=in_flight,
            num_requests=len(bodies),
            max_seconds=MAX_SECONDS,
            num_warmup=num_warmup,
            stream=True,
        )
    )
    if short := [count for count in result.num_tokens if count != num_tokens]:
        raise LoadError(f"{len(short)} streams had {short[0]} tokens and the like, {num_tokens} were asked for")
    return result


def complete(url: str, model: str, prompt: list[int], num_tokens: int) -> str:
    """The greedy text after `prompt`. Raises LoadError."""
    address = Address.of(url)
    with Connection(address) as connection:
        request = encode_request(address, PATH, _body(model, prompt, num_tokens, stream=False))
        response = connection.request(request)
    if response.status != 200:
        raise LoadError(f"{url}{PATH}: {response.status} {response.body[:500].decode(errors='replace')}")
    return str(msgspec.json.decode(response.body)["choices"][0]["text"])


def _body(model: str, prompt: list[int], num_tokens: int, *, stream: bool) -> bytes:
    fields = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return msgspec.json.encode(fields | more)

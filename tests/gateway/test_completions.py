"""Completions over HTTP, streamed and not, against a scheduler that says what it is told to."""

import asyncio
import json
from typing import Any

import pytest

from ipc.types import SamplingParams
from tests.gateway.conftest import Stack, byte_tokenizer, until
from tests.gateway.fake_generation import logprob

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found


async def complete(stack: Stack, prompt: object = "hello", **fields: object) -> tuple[int, Any]:
    return await stack.post("/v1/completions", {"model": "chat", "prompt": prompt, **fields})


async def events(stack: Stack, path: str = "/v1/completions", **fields: object) -> list[Any]:
    """Data of all events of a stream, which ends as it should."""
    async with stack.http.post(path, json={"model": "chat", "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = (await response.text()).split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2] if not part.startswith(":")]


def text_of(found: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for event in found for c in event["choices"] if c["index"] == index)


async def test_completes_a_string(chat_stack: Stack) -> None:
    status, body = await complete(chat_stack, "hello the", max_tokens=4)
    assert status == 200, body
    assert body["object"] == "text_completion"
    assert body["model"] == "chat"
    assert body["id"].startswith("cmpl-")
    text = TOKENIZER.decode((ids("hello the") * 4)[:4])
    assert body["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert chat_stack.schedulers["chat/0"].sequences == [ids("hello the")]


async def test_drafts_are_told_in_usage(chat_stack: Stack) -> None:
    generations = chat_stack.schedulers["chat/0"].generations
    generations.num_drafts, generations.tokens_per_step = (5, 3), 4
    _, body = await complete(chat_stack, "hello the", max_tokens=8, n=2)
    assert body["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 12, "rejected_prediction_tokens": 8,
    }  # fmt: skip


async def test_drafts_behind_a_stop_string_were_not_accepted(chat_stack: Stack) -> None:
    generations = chat_stack.schedulers["chat/0"].generations
    generations.num_drafts, generations.tokens_per_step = (5, 3), 4
    run(chat_stack, ids("hello world and more of it"))
    _, body = await complete(chat_stack, max_tokens=50, stop="rld")
    whole, rest = divmod(len(ids("hello world")), 4)  # the tokens that it took, in steps
    assert 0 < rest < 3
    accepted, drafts = 3 * whole + rest, 5 * (whole + 1)
    assert body["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafts - accepted,
    }  # fmt: skip


async def test_an_empty_prompt_is_not_said_to_be_optional(chat_stack: Stack) -> None:
    for prompt, told in (("", "prompt is an empty string; put some text in"), (["a", ""], "prompt[1] is an empty str")):
        status, body = await complete(chat_stack, prompt)
        assert (status, body["error"]["message"].startswith(told)) == (400, True), body


async def test_streams_the_same(chat_stack: Stack) -> None:
    _, body = await complete(chat_stack, "hello the", max_tokens=12)
    found = await events(chat_stack, prompt="hello the", max_tokens=12, stream_options={"include_usage": True})
    assert text_of(found) == body["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]] == [None] * 11 + ["length"]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == body["usage"]
    assert len({event["id"] for event in found}) == 1


@pytest.mark.parametrize(("given", "rows"), [([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])])
async def test_token_ids_are_taken_as_given(chat_stack: Stack, given: list[object], rows: list[list[int]]) -> None:
    status, body = await complete(chat_stack, given, max_tokens=3)
    assert status == 200
    assert chat_stack.schedulers["chat/0"].sequences == rows
    assert [c["text"] for c in body["choices"]] == [TOKENIZER.decode((row * 3)[:3]) for row in rows]
    assert body["usage"]["prompt_tokens"] == sum(map(len, rows))


async def test_every_parameter_travels(chat_stack: Stack) -> None:
    sent: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": -1.0, "frequency_penalty": 0.5,
        "repetition_penalty": 1.25, "stop_token_ids": [9, 8], "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    more = {"logit_bias": {"5": -100, "6": 1.5}, "seed": -3, "n": 2, "cache_salt": "mine", "max_tokens": 7}
    status, body = await complete(chat_stack, **sent, **more, logprobs=3, echo=True, user="me", metadata={"a": "b"})
    assert status == 200, body
    submits = chat_stack.schedulers["chat/0"].submits
    assert [submit.sampling.seed for submit in submits if submit.sampling] == [-3, -2]
    for submit in submits:
        assert submit.cache_salt == b"mine"
        sampling = submit.sampling
        assert sampling is not None
        for name, value in sent.items():
            assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value), name
        assert sampling.logit_bias == {5: -100, 6: 1.5}
        assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (7, 3, 3)


async def test_what_is_not_given_is_as_usual(chat_stack: Stack) -> None:
    nulls = dict.fromkeys(("temperature", "top_k", "stop", "logit_bias", "n", "seed", "stream_options", "best_of"))
    assert (await complete(chat_stack, top_p=None, **nulls))[0] == 200
    sampling = chat_stack.schedulers["chat/0"].submits[0].sampling
    assert sampling is not None
    assert sampling.seed is not None  # drawn here, so that a lost generation can be made again
    assert sampling == SamplingParams(max_tokens=16, seed=sampling.seed)
    assert (await complete(chat_stack, list(range(3, 200)) * 10 + [3] * 70))[0] == 200
    sampling = chat_stack.schedulers["chat/0"].submits[1].sampling
    assert sampling is not None
    assert sampling.max_tokens == 2048 - 2040  # less than 16 where the context has no more


async def test_top_k_of_minus_one_is_off(chat_stack: Stack) -> None:
    assert (await complete(chat_stack, top_k=-1))[0] == 200
    sampling = chat_stack.schedulers["chat/0"].submits[0].sampling
    assert sampling is not None
    assert sampling.top_k == 0


async def test_choices_of_many_prompts(chat_stack: Stack) -> None:
    _, body = await complete(chat_stack, ["hello", "the"], n=2, max_tokens=2)
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in body["choices"]] == ["hellohello"] * 2 + ["thethe"] * 2
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 8
    found = await events(chat_stack, prompt=["hello", "the"], n=2, max_tokens=2)
    assert [text_of(found, i) for i in range(4)] == ["hellohello"] * 2 + ["thethe"] * 2


def run(stack: Stack, tokens: list[int]) -> None:
    stack.schedulers["chat/0"].generations.script = lambda prompt, submit: tokens


async def test_an_end_token_is_counted_and_not_shown(chat_stack: Stack) -> None:
    run(chat_stack, [*ids("hello"), 2])
    _, body = await complete(chat_stack, max_tokens=5)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("hello", "stop")
    assert body["usage"]["completion_tokens"] == 2
    stop = ids("the")[0]
    run(chat_stack, [*ids("hello"), stop])
    _, body = await complete(chat_stack, max_tokens=5, stop_token_ids=[stop])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("hello", "stop")
    _, body = await complete(chat_stack, max_tokens=5, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "hellothe"


# ── stop strings ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_a_stop_string_ends_everything_at_one_place(chat_stack: Stack, tokens_per_step: int) -> None:
    generations = chat_stack.schedulers["chat/0"].generations
    generations.tokens_per_step = tokens_per_step
    run(chat_stack, ids("hello world and more of it"))
    _, body = await complete(chat_stack, max_tokens=50, stop=["xyz", "rld"], logprobs=0)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello wo", "stop")
    num_tokens = len(ids("hello world"))  # the ones that it took
    assert body["usage"]["completion_tokens"] == num_tokens
    assert "".join(choice["logprobs"]["tokens"]) == "hello world"
    await until(lambda: len(chat_stack.schedulers["chat/0"].aborts) == (tokens_per_step < 100))
    assert not generations.running
    found = await events(chat_stack, prompt="hello", max_tokens=50, stop="rld", stream_options={"include_usage": True})
    assert text_of(found) == "hello wo"
    assert found[-1]["usage"] == body["usage"]
    _, body = await complete(chat_stack, max_tokens=50, stop="rld", include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "hello world"


async def test_a_stop_string_s_answer_tells_what_it_took(chat_stack: Stack) -> None:
    """Though no terminal delta comes: the first one has told it."""
    run(chat_stack, ids("hello world and more of it"))
    fields = {"model": "chat", "prompt": "hello the", "max_tokens": 50, "stop": "rld"}
    async with chat_stack.http.post("/v1/completions", json=fields) as response:
        body = await response.json()
        assert (response.headers["X-Queue-Ms"], response.headers["X-Compute-Ms"]) == ("0.50", "1.50")
    assert body["choices"][0]["text"] == "hello wo"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_text_is_held_back_only_as_long_as_it_must_be(chat_stack: Stack) -> None:
    generations = chat_stack.schedulers["chat/0"].generations
    generations.free = False
    run(chat_stack, ids("abXYcXYZd"))
    request = {"model": "chat", "prompt": "a", "max_tokens": 50, "stream": True, "stop": ["XYZ"]}
    posting = asyncio.ensure_future(chat_stack.http.post("/v1/completions", json=request))
    await until(lambda: bool(generations.running))
    generations.step()
    async with await posting as response:

        async def next_text() -> str:
            line = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5)
            return str(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"])

        assert await next_text() == "a"
        for text in ("b", None, None, "XYc", None, None, ""):
            generations.step()
            if text is not None:
                assert await next_text() == text
        assert await response.text() == "data: [DONE]\n\n"


async def test_stop_strings_do_not_count_before_min_tokens(chat_stack: Stack) -> None:
    run(chat_stack, ids("aaXbXc"))
    _, body = await complete(chat_stack, max_tokens=50, stop="X", min_tokens=4)
    assert body["choices"][0]["text"] == "aaXb"


async def test_half_a_character_is_never_sent(chat_stack: Stack) -> None:
    text = "🌷ö漢字 the"
    run(chat_stack, ids(text))
    found = await events(chat_stack, prompt="a", max_tokens=50)
    assert text_of(found) == text
    assert all("�" not in c["text"] for event in found for c in event["choices"])
    run(chat_stack, ids("🌷")[:-1])
    _, body = await complete(chat_stack, max_tokens=50)
    assert body["choices"][0]["text"] == "�"  # it ended there


# ── logprobs and echo ───────────────────────────────────────────────────────────────────────────────────────


async def test_logprobs(chat_stack: Stack) -> None:
    run(chat_stack, ids("hello wor"))
    _, body = await complete(chat_stack, logprobs=2)
    found = body["choices"][0]["logprobs"]
    tokens = ids("hello wor")
    assert found["tokens"] == ["hello", " w", "or"]
    assert found["text_offset"] == [0, 5, 7]
    assert found["token_logprobs"] == [logprob(token) for token in tokens]
    for token, text, top in zip(tokens, found["tokens"], found["top_logprobs"], strict=True):
        assert top[text] == logprob(token)
        assert len(top) == 3  # the two likeliest, and the one that was drawn


async def test_echo_shows_the_prompt_with_its_logprobs(chat_stack: Stack) -> None:
    run(chat_stack, ids("the"))
    _, body = await complete(chat_stack, "hello wor", max_tokens=1, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert choice["text"] == "hello worthe"
    assert choice["logprobs"]["tokens"] == ["hello", " w", "or", "the"]
    assert choice["logprobs"]["text_offset"] == [0, 5, 7, 9]
    assert choice["logprobs"]["token_logprobs"] == [None, *(logprob(token) for token in ids("hello worthe")[1:])]
    assert choice["logprobs"]["top_logprobs"][0] is None
    found = await events(chat_stack, prompt="hello wor", max_tokens=1, echo=True)
    assert text_of(found) == "hello worthe"
    _, body = await complete(chat_stack, ids("hello"), max_tokens=1, echo=True)
    assert body["choices"][0]["text"] == "hellothe"


async def test_only_the_prompts_logprobs(chat_stack: Stack) -> None:
    _, body = await complete(chat_stack, "hello wor", max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello wor", "length")
    assert len(choice["logprobs"]["tokens"]) == 3
    assert body["usage"]["completion_tokens"] == 0


async def test_special_tokens_are_shown_on_request(chat_stack: Stack) -> None:
    run(chat_stack, [*ids("a"), 1, *ids("b")])
    assert (await complete(chat_stack))[1]["choices"][0]["text"] == "ab"
    _, body = await complete(chat_stack, skip_special_tokens=False)
    assert body["choices"][0]["text"] == "a<|im_start|>b"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompts_logprobs(chat_stack: Stack, stream: bool) -> None:
    """Made ready away from the loop, and right all the same."""
    prompt = ids("hello wor") * 300
    fields: dict[str, Any] = {"max_tokens": 2, "echo": True, "logprobs": 2}
    if stream:
        found = [event["choices"][0] for event in await events(chat_stack, prompt=prompt, **fields)]
    else:
        found = (await complete(chat_stack, prompt, **fields))[1]["choices"]
    logprobs = [value for choice in found for value in choice["logprobs"]["token_logprobs"]]
    assert logprobs == [None, *(logprob(token) for token in (prompt + prompt[:2])[1:])]
    assert "".join(choice["text"] for choice in found) == "hello wor" * 300 + "hello w"

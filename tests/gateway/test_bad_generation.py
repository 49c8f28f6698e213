"""Whatever a client sends to completions and chat: an error names the field, and the next good request is right."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.fake_scheduler import chat_facts, facts
from tests.gateway.test_bad_input import check_shape
from tests.gateway.test_completions import complete

DEEP: Any = {}
for _ in range(100):
    DEEP = {"properties": {"a": DEEP}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# fields that both routes take: the field's value, and the param of the error if it is not the field
SHARED: list[tuple[str, Any, str | None]] = [
    ("model", None, None),
    ("model", 3, None),
    ("n", 0, None),
    ("n", -1, None),
    ("n", 129, None),
    ("n", 1.5, None),
    ("n", "2", None),
    ("n", True, None),
    ("temperature", -0.1, None),
    ("temperature", 2.1, None),
    ("temperature", "hot", None),
    ("temperature", 1e300, None),
    ("top_p", -0.1, None),
    ("top_p", 1.1, None),
    ("top_k", -2, None),
    ("top_k", 2**40, None),
    ("top_k", 0.5, None),
    ("min_p", 1.5, None),
    ("presence_penalty", 2.5, None),
    ("frequency_penalty", -2.5, None),
    ("repetition_penalty", 0, None),
    ("repetition_penalty", -1, None),
    ("repetition_penalty", 101, None),
    ("logit_bias", [1], None),
    ("logit_bias", {"a": 1}, None),
    ("logit_bias", {"-1": 1}, None),
    ("logit_bias", {"5": 101}, None),
    ("logit_bias", {"5": "x"}, None),
    ("logit_bias", {"300": 1}, None),
    ("logit_bias", {str(i): 1 for i in range(1025)}, None),
    ("seed", 2**63, None),
    ("seed", 1.5, None),
    ("seed", "a", None),
    ("stop", "", None),
    ("stop", 5, None),
    ("stop", ["a", ""], "stop[1]"),
    ("stop", ["a", None], "stop[1]"),
    ("stop", ["a"] * 17, None),
    ("stop", "a" * 257, None),
    ("stop_token_ids", [300], None),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", "a", None),
    ("stop_token_ids", [1] * 113, None),
    ("min_tokens", -1, None),
    ("min_tokens", 50, None),  # more than max_tokens
    ("max_tokens", 0, None),
    ("max_tokens", -1, None),
    ("max_tokens", 2**40, None),
    ("max_tokens", 2.5, None),
    ("ignore_eos", "yes", None),
    ("stream", 1, None),
    ("stream_options", {"include_usage": True}, None),  # without stream
    ("stream_options", {"other": True}, "stream_options.other"),
    ("cache_salt", "", None),
    ("cache_salt", 5, None),
    ("user", 5, None),
    ("metadata", "a", None),
    ("store", True, None),
    ("service_tier", "flex", None),
    ("response_format", "json", None),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema.schema"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
        "response_format.json_schema.schema",
    ),
    ("guided_json", DEEP, None),
    ("guided_json", "{", None),
    ("guided_json", [], None),
    ("guided_regex", "(", None),
    ("guided_regex", "", None),
    ("guided_regex", "a" * 20_000, None),
    ("guided_choice", [], None),
    ("guided_choice", ["a", ""], None),
    ("structured_outputs", {"regex": "(", "other": 1}, "structured_outputs.other"),
    ("structured_outputs", {"regex": "("}, "structured_outputs.regex"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
    # what others take and this server does not; and what nobody takes
    ("best_of", 2, None),
    ("use_beam_search", True, None),
    ("length_penalty", 1.0, None),
    ("truncate_prompt_tokens", 5, None),
    ("prompt_logprobs", 1, None),
    ("bad_words", ["a"], None),
    ("guided_grammar", "a", None),
    ("nonsense", {"deep": [1]}, None),
]
COMPLETIONS: list[tuple[str, Any, str | None]] = [
    ("prompt", None, None),
    ("prompt", [], None),
    ("prompt", "", None),
    ("prompt", ["a", ""], "prompt[1]"),
    ("prompt", [[1], []], "prompt[1]"),
    ("prompt", ["a", 1], "prompt[1]"),
    ("prompt", [300], None),
    ("prompt", [[5], [5, 300]], "prompt[1]"),
    ("prompt", [-1], "prompt[0]"),
    ("prompt", [1.5], "prompt[0]"),
    ("prompt", {"text": "a"}, None),
    ("prompt", ["a"] * 129, None),
    ("prompt", [5] * 2048, None),
    ("prompt", [5] * 2040, None),  # with max_tokens
    ("logprobs", 21, None),
    ("logprobs", -1, None),
    ("logprobs", True, None),
    ("echo", "yes", None),
    ("suffix", "b", None),
    ("messages", [], None),
    ("tools", [TOOL], None),
]
USER = {"role": "user", "content": "a"}


def messages(*changed: object) -> list[object]:
    return [USER, *changed]


CHAT: list[tuple[str, Any, str | None]] = [
    ("messages", None, None),
    ("messages", [], None),
    ("messages", "a", None),
    ("messages", ["a"], "messages[0]"),
    ("messages", [{}], "messages[0].role"),
    ("messages", [USER] * 4097, None),
    ("messages", messages({"role": "king", "content": "a"}), "messages[1].role"),
    ("messages", messages({"role": 3, "content": "a"}), "messages[1].role"),
    ("messages", messages({"role": "user"}), "messages[1].content"),
    ("messages", messages({"role": "user", "content": None}), "messages[1].content"),
    ("messages", messages({"role": "user", "content": []}), "messages[1].content"),
    ("messages", messages({"role": "user", "content": 5}), "messages[1].content"),
    ("messages", messages({"role": "user", "content": ["a"]}), "messages[1].content[0]"),
    (
        "messages",
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}),
        "messages[1].content[0].type",
    ),
    ("messages", messages({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
    ("messages", messages({"role": "user", "content": "a", "weight": 1}), "messages[1].weight"),
    ("messages", messages({"role": "user", "content": "a", "tool_calls": [CALL]}), "messages[1].tool_calls"),
    ("messages", messages({"role": "assistant", "tool_calls": [{"id": "x"}]}), "messages[1].tool_calls[0].function"),
    (
        "messages",
        messages({"role": "assistant", "tool_calls": [CALL | {"type": "magic"}]}),
        "messages[1].tool_calls[0].type",
    ),
    ("messages", messages({"role": "assistant", "content": None}), "messages[1].content"),
    ("messages", messages({"role": "tool", "content": "a"}), "messages[1].tool_call_id"),
    ("messages", messages({"role": "user", "content": "a" * 3000}), "messages"),
    ("max_completion_tokens", 0, None),
    ("max_completion_tokens", 5, None),  # max_tokens is another
    ("logprobs", 1, None),
    ("top_logprobs", 2, None),  # without logprobs
    ("top_logprobs", 21, None),
    ("echo", True, None),
    ("prompt", "a", None),
    ("tools", "a", None),
    ("tools", [5], "tools[0]"),
    ("tools", [{"type": "magic"}], "tools[0]"),
    ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ("tools", [TOOL, TOOL], "tools[1].function.name"),
    ("tools", [TOOL] * 129, None),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": 5}}], "tools[0].function.parameters"),
    ("tool_choice", "required", None),  # without tools
    ("tool_choice", "sometimes", None),
    ("tool_choice", 5, None),
    ("parallel_tool_calls", "yes", None),
    ("chat_template", "{{ messages }}", None),
    ("chat_template_kwargs", "a", None),
    ("chat_template_kwargs", DEEP, None),
    ("tools", [{"type": "function", "function": {"name": "f", "parameters": DEEP}}], "tools[0]"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
    ("add_generation_prompt", 1, None),
    ("continue_final_message", True, None),  # the last one is the user's
    ("functions", [{}], None),
    ("function_call", "auto", None),
    ("reasoning_effort", "high", None),
    ("modalities", ["audio"], None),
]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "chat", "prompt": "hello", "max_tokens": 10},
    "/v1/chat/completions": {"model": "chat", "messages": [USER], "max_tokens": 10},
}


async def good_still_right(stack: Stack) -> None:
    status, body = await complete(stack, "hello", max_tokens=2)
    assert (status, body["choices"][0]["text"]) == (200, "hellohello")


@pytest.mark.parametrize("path", GOOD)
async def test_every_bad_field_is_told_and_forgotten(chat_stack: Stack, path: str) -> None:
    for field, value, param in SHARED + (COMPLETIONS if path == "/v1/completions" else CHAT):
        for stream in (False, True):
            if stream and field == "stream_options" and param is None:
                continue
            body = GOOD[path] | ({"stream": True} if stream else {}) | {field: value}
            status, answer = await chat_stack.post(path, body)
            assert status == 400, (body, answer)
            error = check_shape(answer)
            assert error["param"] == (param or field), (body, answer)
            assert error["type"] == "invalid_request_error"
    assert not chat_stack.schedulers["chat/0"].submits
    await good_still_right(chat_stack)


async def test_two_fields_that_do_not_go_together(chat_stack: Stack) -> None:
    chat = GOOD["/v1/chat/completions"]
    going_on = [USER, {"role": "assistant", "content": "b"}]
    named = {"type": "function", "function": {"name": "g"}}
    for fields, param in [
        ({"tools": [TOOL], "tool_choice": named}, "tool_choice.function.name"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        (
            {"messages": going_on, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ]:
        status, answer = await chat_stack.post("/v1/chat/completions", chat | fields)
        assert (status, check_shape(answer)["param"]) == (400, param), answer


async def test_a_prompt_beyond_the_context_is_told_by_numbers(chat_stack: Stack) -> None:
    status, answer = await complete(chat_stack, [5] * 2000, max_tokens=100)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "2000 + 100 = 2100" in answer["error"]["message"]
    assert "2048" in answer["error"]["message"]
    assert (await complete(chat_stack, [5] * 2000, max_tokens=48))[0] == 200
    status, answer = await complete(chat_stack, "a" * 600_000)
    assert (status, answer["error"]["code"]) == (413, "text_too_long")
    assert "truncate" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model": "chat", "prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"model": "chat", "prompt": "a", "top_p": -Infinity}', "top_p"),
        (b'{"model": "chat", "prompt": "a", "min_p": 1e999}', "min_p"),
        (b'{"model": "chat", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"model": "chat", "prompt": "a"', None),
        (b'{"model": "chat", "prompt": ' + b"[" * 50_000, "prompt[0][0]"),
        (b'{"model": "chat", "prompt": "a", "metadata": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}", None),
    ],
    ids=range(7),
)
async def test_what_is_not_json(chat_stack: Stack, body: bytes, param: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    async with chat_stack.http.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 400
        assert check_shape(await response.json())["param"] == param
    await good_still_right(chat_stack)


async def test_tasks_a_model_does_not_do(make_stack: MakeStack, tiny_dir: Path, chat_dir: Path) -> None:
    stack = await make_stack(
        {"chat": (chat_dir, chat_facts()), "tiny": (tiny_dir, facts()), "scorer": (tiny_dir, facts(task="score"))}
    )
    for model, task in (("tiny", "embed"), ("scorer", "score")):
        for path, body in GOOD.items():
            status, answer = await stack.post(path, body | {"model": model})
            assert (status, check_shape(answer)["param"]) == (400, "model")
            assert task in answer["error"]["message"]
    status, answer = await stack.embed("a", model="chat")
    assert (status, check_shape(answer)["param"]) == (400, "model")
    assert "generate" in answer["error"]["message"]
    async with stack.http.get("/v1/models") as response:
        listed = {item["id"]: item["max_model_len"] for item in (await response.json())["data"]}
    assert listed == {"chat": 2048, "tiny": 32, "scorer": 32}


async def test_a_model_without_a_template_completes_but_does_not_chat(make_stack: MakeStack, chat_dir: Path) -> None:
    bare = chat_dir.parent / "bare"
    bare.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (bare / name).write_bytes((chat_dir / name).read_bytes())
    stack = await make_stack({"chat": (bare, chat_facts())})
    status, answer = await stack.post("/v1/chat/completions", GOOD["/v1/chat/completions"])
    assert (status, check_shape(answer)["param"]) == (400, "messages")
    await good_still_right(stack)


@pytest.mark.parametrize("path", GOOD)
async def test_random_bodies(chat_stack: Stack, path: str) -> None:
    rng = random.Random(0)
    values = [value for _, value, _ in SHARED + COMPLETIONS + CHAT if len(json.dumps(value)) < 5000]
    names = sorted({name for name, _, _ in SHARED + COMPLETIONS + CHAT} - {"stream"})
    statuses = set()
    for _ in range(400):
        body = dict(GOOD[path])
        for name in rng.sample(names, rng.choice([1, 1, 2, 3])):
            body[name] = rng.choice(values)
        status, answer = await chat_stack.post(path, body)
        statuses.add(status)
        if status != 200:
            assert status in (400, 404, 413), (body, answer)
            check_shape(answer)
    assert {200, 400} <= statuses
    await good_still_right(chat_stack)

"""The two default models on one stack, by the OpenAI SDK; the chat model against what transformers gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.goldens import GoldenPrompt, read_goldens
from tests.integration.stack import Stack

MODEL, EMBEDDER = "smollm2-135m-instruct", "all-minilm-l6-v2"
GOLDENS = {golden.name: golden for golden in read_goldens("smollm2")}
GRAVITY: list[Any] = [{"role": "user", "content": "What is gravity?"}]
NUM_TOKENS = 16  # of the goldens' 64
FLOWER = {
    "type": "object",
    "properties": {"flower": {"type": "string", "maxLength": 12}, "colour": {"enum": ["red", "blue"]}},
    "required": ["flower", "colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path, minilm_dir: Path) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("bq"), {MODEL: smollm2_dir, EMBEDDER: minilm_dir}) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def answer(golden: GoldenPrompt, tokenizer: Tokenizer, num_tokens: int = NUM_TOKENS) -> str:
    return str(tokenizer.decode(golden.tokens[:num_tokens]))


def test_chat(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    golden = GOLDENS["chat"]
    made = client.chat.completions.create(
        model=MODEL, messages=GRAVITY, temperature=0, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=2
    )
    choice = made.choices[0]
    assert choice.message.content == answer(golden, tokenizer)
    assert choice.finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(golden.prompt_ids), NUM_TOKENS)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    told = [token.logprob for token in choice.logprobs.content]
    assert told == pytest.approx(golden.logprobs[:NUM_TOKENS], abs=5e-3)
    for token in choice.logprobs.content:  # greedy: the token is the likeliest
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_chat_as_a_stream(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=GRAVITY,
        temperature=0,
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == answer(GOLDENS["chat"], tokenizer)
    assert len([piece for piece in pieces if piece]) > NUM_TOKENS / 2  # as they come, not all at the end
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS


@pytest.mark.parametrize("name", ["english", "digits", "chinese"])
def test_completions(name: str, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    golden = GOLDENS[name]
    made = client.completions.create(
        model=MODEL,
        prompt=golden.text,
        temperature=0,
        max_tokens=NUM_TOKENS,
        logprobs=1,
        extra_body={"ignore_eos": True},
    )
    assert made.choices[0].text == answer(golden, tokenizer)
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.token_logprobs == pytest.approx(golden.logprobs[:NUM_TOKENS], abs=5e-3)
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(golden.prompt_ids)


def test_an_end_token_ends_and_is_not_shown(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    golden = GOLDENS["english"]
    length = golden.tokens.index(2)  # <|im_end|>
    made = client.completions.create(model=MODEL, prompt=golden.text, temperature=0, max_tokens=64)
    assert made.choices[0].text == answer(golden, tokenizer, length)
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.completion_tokens == length + 1


def test_stop_strings_cut_the_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    golden = GOLDENS["story"]
    whole = answer(golden, tokenizer)
    stop = "achines, o"  # begins and ends within tokens
    assert stop in whole
    made = client.completions.create(model=MODEL, prompt=golden.text, temperature=0, max_tokens=NUM_TOKENS, stop=[stop])
    assert made.choices[0].text == whole.partition(stop)[0]
    assert made.choices[0].finish_reason == "stop"


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        made = client.completions.create(model=MODEL, prompt="Flowers are", max_tokens=8, n=2, seed=seed)
        return [choice.text for choice in made.choices]

    first = sample(7)
    assert first == sample(7)
    assert first != sample(8)
    assert first[0] != first[1]


def test_structured_output(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a flower and its colour."}],
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "flower", "schema": FLOWER, "strict": True}},
    )
    found = json.loads(made.choices[0].message.content or "")
    assert set(found) == {"flower", "colour"}
    assert found["colour"] in ("red", "blue")
    assert len(found["flower"]) <= 12
    assert made.choices[0].finish_reason == "stop"


def test_a_forced_tool_call(client: openai.OpenAI) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    made = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        temperature=0,
        max_tokens=64,
        tools=[{"type": "function", "function": {"name": "weather", "parameters": city}}],
        tool_choice="required",
    )
    calls = made.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")
    assert made.choices[0].finish_reason == "tool_calls"


def test_embedding_goes_on_beside_a_stream(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    def embed() -> list[float]:
        return client.embeddings.create(model=EMBEDDER, input="tulips from Amsterdam").data[0].embedding

    alone, beside, pieces = embed(), [], []
    for chunk in client.chat.completions.create(
        model=MODEL, messages=GRAVITY, temperature=0, max_tokens=NUM_TOKENS, stream=True
    ):
        pieces.append(chunk.choices[0].delta.content or "")
        if len(beside) < 4:
            beside.append(embed())
    assert "".join(pieces) == answer(GOLDENS["chat"], tokenizer)
    for vector in beside:
        assert vector == pytest.approx(alone, abs=1e-5)


def test_what_cannot_be_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model=MODEL, prompt=[5] * 8192, max_tokens=8)
    with pytest.raises(openai.BadRequestError, match=MODEL):
        client.embeddings.create(model=MODEL, input="a language model does not embed")
    with pytest.raises(openai.BadRequestError, match=EMBEDDER):
        client.chat.completions.create(model=EMBEDDER, messages=GRAVITY)

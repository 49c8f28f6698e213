"""A model's generation_config.json: what requests leave open is as it says there, unless that is turned off."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.models import ModelFilesError, load_model
from ipc.types import SamplingParams
from tests.gateway.conftest import MakeStack, write_chat_model, write_model
from tests.gateway.fake_scheduler import chat_facts

FILE = {
    "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": [2],
    "max_length": 20, "min_p": None, "transformers_version": "4.51.0",
}  # fmt: skip
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
]


def write(directory: Path, **content: object) -> Path:
    write_chat_model(directory)
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(("route", "body"), ROUTES, ids=["completions", "chat"])
@pytest.mark.parametrize("on", [True, False])
async def test_what_a_request_leaves_open_is_the_model_s_to_say(
    make_stack: MakeStack, tmp_path: Path, route: str, body: dict[str, Any], on: bool
) -> None:
    stack = await make_stack({"chat": (write(tmp_path / "m", **FILE), chat_facts())}, generation_defaults=on)
    given = {"temperature": 0, "top_k": -1, "repetition_penalty": 1, "top_p": None, "min_p": 0.2}
    for more in ({}, given):
        status, answer = await stack.post(route, {"model": "chat", "max_tokens": 2, "seed": 1} | body | more)
        assert status == 200, answer
    common = {"max_tokens": 2, "seed": 1}
    first, second = (submit.sampling for submit in stack.schedulers["chat/0"].submits)
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05} if on else {}
    assert first == SamplingParams(**common, **own)  # type: ignore[arg-type]
    assert second == SamplingParams(**common, temperature=0.0, min_p=0.2, top_p=0.9 if on else 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [{"temperature": "hot"}, {"top_p": 1.5}, {"repetition_penalty": 0}, {"top_k": 0.5}])
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, content: dict[str, object]) -> None:
    directory = write(tmp_path, **content)
    with pytest.raises(ModelFilesError, match=r"generation_config.json: .*gateway.generation_defaults = false"):
        load_model("m", directory)
    assert load_model("m", directory, generation_defaults=False).generator is not None


def test_a_file_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path)
    (directory / "generation_config.json").write_text('{"eos_token_id": ' + "[" * 100_000)
    with pytest.raises(ModelFilesError, match=r"generation_config.json: "):
        load_model("m", directory)


def test_an_embedding_model_does_not_care(tmp_path: Path) -> None:
    (write_model(tmp_path) / "generation_config.json").write_text("[]")
    assert load_model("m", tmp_path).name == "m"

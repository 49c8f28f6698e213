"""Grammars as ranks run them: what they let through, what they stop, and what is refused with the field's name."""

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from gateway.errors import InvalidRequest
from gateway.schema_bounds import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from gateway.structured import Grammars, Thinking
from gateway.tool_calls import HERMES, LLAMA, ArgumentsDelta, CallStart, ToolCallParser, ToolFormat
from gateway.tools import Tool, ToolChoice, read_tool_choice, read_tools
from tests.gateway.test_tokenize import FILES

TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def tokenizer_with(tags: list[str]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(FILES["bpe"])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return tokenizer


TAGGED = tokenizer_with(TAGS)
PLAIN = tokenizer_with([])
END = PLAIN.token_to_id("<|endoftext|>")
RANKS = {id(tokenizer): LLTokenizer(tokenizer.to_str(), eos_token=END) for tokenizer in (TAGGED, PLAIN)}
GRAMMARS = Grammars()
TAGGED_GRAMMARS = Grammars(TAGS)


def accepts(grammar: str | None, text: str, tokenizer: Tokenizer = PLAIN) -> bool:
    """Whether a model could write `text`, in its tokenizer's own tokens, and end there."""
    assert grammar is not None
    matcher = LLMatcher(RANKS[id(tokenizer)], grammar, log_level=0)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    taken = matcher.try_consume_tokens(ids)
    assert not matcher.get_error()
    return taken == len(ids) and matcher.is_accepting()


def refusal(call: Any, *args: Any, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call(*args, **options)
    return caught.value


def schema_format(schema: object, **fields: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"$ref": "#/$defs/kind"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["é/", 1]}},
}


def test_any_object() -> None:
    grammar = GRAMMARS.of_format({"type": "json_object"})
    for text in ("{}", '{"a": [1, 2.5e3, {"b": null}], "東": "\\n🌷"}', '{\n  "a" : true}', '{"a":1}'):
        assert accepts(grammar, text), text
    for text in ("[]", '"a"', "", '{"a": 1', "{a: 1}", '{"a": 1} so', '{"a": ' + " " * 33 + "1}"):
        assert not accepts(grammar, text), text


words = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), max_size=6
)  # llguidance has no DEL
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(words, json_values, max_size=3), st.sampled_from([None, 2]))
def test_every_object_can_be_written(value: dict[str, Any], indent: int | None) -> None:
    assert accepts(GRAMMARS.of_format({"type": "json_object"}), json.dumps(value, ensure_ascii=False, indent=indent))


def test_a_schema() -> None:
    grammar = GRAMMARS.of_format(schema_format(PERSON, strict=True))
    assert accepts(grammar, '{"name": "Ada", "kind": "é/"}')
    assert accepts(grammar, '{"name": "", "kind": 1}')
    for text in (
        '{"name": "Ada"}',
        '{"name": "Adadada", "kind": 1}',
        '{"name": "Ada", "kind": 2}',
        '{"name": "Ada", "kind": 1, "more": 1}',
    ):
        assert not accepts(grammar, text), text
    assert GRAMMARS.of_schema(PERSON, "guided_json") == GRAMMARS.of_format(schema_format(PERSON))


def test_no_structure() -> None:
    assert GRAMMARS.of_format(None) is None
    assert GRAMMARS.of_format({"type": "text"}) is None


def test_strict_refuses_what_cannot_be_enforced_and_otherwise_it_is_passed_over() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    error = refusal(GRAMMARS.of_format, schema_format(schema, strict=True))
    assert error.param == "response_format.json_schema.schema"
    assert "uniqueItems" in error.message
    for fields in ({}, {"strict": False}, {"strict": None}):
        grammar = GRAMMARS.of_format(schema_format(schema, **fields))
        assert accepts(grammar, "[1, 1]")
        assert not accepts(grammar, '["a"]')


@pytest.mark.parametrize(
    ("response_format", "param", "says"),
    [
        (schema_format({"type": "objec"}), "response_format.json_schema.schema", "Invalid type: objec"),
        (schema_format({"$ref": "#/$defs/no"}), "response_format.json_schema.schema", "leads nowhere"),
        (schema_format({"$ref": "http://localhost/a"}), "response_format.json_schema.schema", "http://localhost/a"),
        (schema_format({"type": "string", "pattern": "(?=a)b"}), "response_format.json_schema.schema", "look-around"),
        (schema_format({"enum": []}), "response_format.json_schema.schema", "Unsatisfiable"),
        (schema_format({"type": "object", "properties": 5}), "response_format.json_schema.schema", "enforced"),
        (schema_format({"$ref": "#"}), "response_format.json_schema.schema", "no text can begin"),
        (schema_format(True), "response_format.json_schema.schema", "an object"),
        (schema_format({"enum": ["x" * MAX_SCHEMA_BYTES]}), "response_format.json_schema.schema", "bytes"),
        ({"type": "json_schema"}, "response_format.json_schema.schema", "an object"),
        ({"type": "json_schema", "json_schema": 5}, "response_format.json_schema.schema", "an object"),
        ({"type": "xml"}, "response_format.type", "one of"),
        ({}, "response_format.type", "one of"),
    ],
)
def test_what_cannot_be_a_format_is_named(response_format: dict[str, Any], param: str, says: str) -> None:
    error = refusal(GRAMMARS.of_format, response_format)
    assert error.param == param
    assert says in error.message
    assert "x-guidance" not in error.message
    assert "%json" not in error.message
    assert len(error.message) < 400


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    for _ in range(depth - 1):
        schema = {"items": schema, "type": "array"}
    return schema


def test_depth_is_bounded() -> None:
    grammar = GRAMMARS.of_schema(nested(MAX_SCHEMA_DEPTH), "p")
    assert accepts(grammar, "[" * MAX_SCHEMA_DEPTH + "]" * MAX_SCHEMA_DEPTH)
    for depth in (MAX_SCHEMA_DEPTH + 1, 50_000):
        error = refusal(GRAMMARS.of_schema, nested(depth), "p")
        assert (error.param, "deeper than" in error.message) == ("p", True)


def test_a_client_cannot_set_options_of_the_compiler() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": {"item_separator": ";"}}
    grammar = GRAMMARS.of_schema(schema, "p")
    assert accepts(grammar, "[1, 2]")
    assert not accepts(grammar, "[1;2]")


def test_patterns() -> None:
    grammar = GRAMMARS.of_regex(r'[a-z]+/\d{2}\n"é', "guided_regex")
    assert accepts(grammar, 'abc/12\n"é')
    assert not accepts(grammar, 'abc/123\n"é')
    for pattern, says in (
        ("a(b", "unclosed group"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreference"),
        ("", "0"),
        ("a\\", "escape"),
    ):
        error = refusal(GRAMMARS.of_regex, pattern, "guided_regex")
        assert error.param == "guided_regex"
        assert says in error.message


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5), st.text(max_size=8))
@settings(deadline=None, max_examples=30)
def test_choices(choices: list[str], other: str) -> None:
    grammar = GRAMMARS.of_choice(choices, "guided_choice")
    assert all(accepts(grammar, choice) for choice in choices)
    assert accepts(grammar, other) == (other in choices)


def test_choices_are_bounded() -> None:
    for choices in ([], ["a", ""], ["a"] * 5000, ["a" * 200_000]):
        assert refusal(GRAMMARS.of_choice, choices, "guided_choice").param == "guided_choice"


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGGED], ids=["tags in letters", "tags as tokens"])
@pytest.mark.parametrize(
    ("thinking", "right", "wrong"),
    [
        ("never", ["{}"], ["<think>a</think>{}", "a</think>{}"]),
        ("maybe", ["{}", "<think>\na {x}\n</think>\n\n{}", "<think></think>{}"], ["a</think>{}", "<think>{}", "a{}"]),
        ("begun", ["a\n</think>\n\n{}", "</think>{}"], ["{}", "<think>{}"]),
    ],
)
def test_thinking_comes_before_the_structure(
    thinking: Thinking, right: list[str], wrong: list[str], tokenizer: Tokenizer
) -> None:
    grammars = TAGGED_GRAMMARS if tokenizer is TAGGED else GRAMMARS
    grammar = grammars.of_format({"type": "json_object"}, thinking)
    for text in right:
        assert accepts(grammar, text, tokenizer), text
    for text in wrong:
        assert not accepts(grammar, text, tokenizer), text


def tool(name: str, parameters: object = None, **fields: object) -> dict[str, Any]:
    function = {"name": name, **fields} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


TOOLS = read_tools([tool("find", PERSON), tool("now")])
FIND = {"name": "Ada", "kind": "é/"}


def written(form: ToolFormat, *calls: tuple[str, object]) -> str:
    texts = [json.dumps({"name": name, form.arguments: arguments}, ensure_ascii=False) for name, arguments in calls]
    return form.between.join(form.open + text + form.close for text in texts)


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGGED], ids=["tags in letters", "tags as tokens"])
@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_forced_calls(form: ToolFormat, tokenizer: Tokenizer) -> None:
    grammars = TAGGED_GRAMMARS if tokenizer is TAGGED else GRAMMARS
    find, now = ("find", FIND), ("now", {})
    right = [[find], [now], [find, now], [now] * 16]
    wrong = [[], [now] * 17, [("other", {})], [("find", {})], [("now", {"a": 1})]]
    grammar = grammars.of_tools(form, TOOLS, ToolChoice("required"))
    for calls in right:
        assert accepts(grammar, written(form, *calls), tokenizer), calls
    for calls in wrong:
        assert not accepts(grammar, written(form, *calls), tokenizer), calls
    assert not accepts(grammar, "hello", tokenizer)
    one = grammars.of_tools(form, TOOLS, ToolChoice("required"), parallel=False)
    assert accepts(one, written(form, find), tokenizer)
    assert not accepts(one, written(form, find, now), tokenizer)
    named = grammars.of_tools(form, TOOLS, ToolChoice("named", "now"), thinking="maybe")
    assert accepts(named, written(form, now), tokenizer)
    assert accepts(named, "<think>\nso\n</think>\n\n" + written(form, now), tokenizer)
    assert not accepts(named, written(form, find), tokenizer)
    assert not accepts(named, written(form, now, now), tokenizer)


def written_at_random(grammar: str, tokenizer: Tokenizer, rng: random.Random) -> str:
    """What a model without any sense writes: of the tokens allowed, any one."""
    matcher = LLMatcher(RANKS[id(tokenizer)], grammar, log_level=0)
    ids: list[int] = []
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = rng.choice(np.flatnonzero(bits).tolist())
        if token == END:
            break
        assert matcher.consume_token(token)
        ids.append(token)
    text: str = tokenizer.decode(ids)
    return text


@pytest.mark.parametrize("tokenizer", [PLAIN, TAGGED], ids=["tags in letters", "tags as tokens"])
@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
def test_whatever_a_forced_model_writes_is_calls(form: ToolFormat, tokenizer: Tokenizer) -> None:
    grammars = TAGGED_GRAMMARS if tokenizer is TAGGED else GRAMMARS
    grammar = grammars.of_tools(form, TOOLS, ToolChoice("required"))
    assert grammar is not None
    rng = random.Random(7)
    names = Counter[str]()
    for _ in range(12):
        parser = ToolCallParser(form)
        calls: list[tuple[str, str]] = []
        for event in [*parser.feed(written_at_random(grammar, tokenizer, rng)), *parser.finish()]:
            if isinstance(event, CallStart):
                calls.append((event.name, ""))
            else:
                assert isinstance(event, ArgumentsDelta)  # and no content
                calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        assert calls
        for name, arguments in calls:
            value = json.loads(arguments)
            assert value == {} if name == "now" else value.keys() == {"name", "kind"} and value["kind"] in ("é/", 1)
            names[name] += 1
    assert names.keys() == {"find", "now"}


def test_calls_that_nothing_forces() -> None:
    for mode in ("none", "auto"):
        assert GRAMMARS.of_tools(None, TOOLS, ToolChoice(mode)) is None
    error = refusal(GRAMMARS.of_tools, None, TOOLS, ToolChoice("required"))
    assert error.param == "tool_choice"


def test_the_tool_at_fault_is_named() -> None:
    tools = [*TOOLS, Tool("bad", {"type": "objec"})]
    error = refusal(GRAMMARS.of_tools, HERMES, tools, ToolChoice("required"))
    assert error.param == "tools[2].function.parameters"
    strict = read_tools([tool("f", {"type": "array", "uniqueItems": True}, strict=True)])
    assert "uniqueItems" in refusal(GRAMMARS.of_tools, HERMES, strict, ToolChoice("required")).message


def test_tools_that_are_large_together_are_refused_before_they_are_compiled() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    few = [Tool(f"f{i}", schema) for i in range(3)]
    assert GRAMMARS.of_tools(HERMES, few, ToolChoice("required")) is not None
    many = [Tool(f"f{i}", {**schema, "title": str(i)}) for i in range(120)]
    start = time.process_time()
    error = refusal(GRAMMARS.of_tools, HERMES, many, ToolChoice("required"))
    assert time.process_time() - start < 1
    assert (error.param, "bytes in all" in error.message) == ("tools", True)
    assert GRAMMARS.of_tools(HERMES, many, ToolChoice("named", "f7")) is not None  # each would do


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function"}], "tools[0]"),
        ([{"type": "retrieval", "function": {"name": "f"}}], "tools[0]"),
        ([tool("f"), tool("f")], "tools[1].function.name"),
        ([tool("two words")], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("x" * 65)], "tools[0].function.name"),
        ([tool('"')], "tools[0].function.name"),
        ([tool("f", [])], "tools[0].function.parameters"),
        ([tool(f"f{i}") for i in range(129)], "tools"),
    ],
)
def test_tools_that_are_none_are_named(tools: list[dict[str, Any]], param: str) -> None:
    assert refusal(read_tools, tools).param == param


def test_tool_choice() -> None:
    assert read_tool_choice(None, []) == ToolChoice("none")
    assert read_tool_choice("none", []) == ToolChoice("none")
    assert read_tool_choice(None, TOOLS) == ToolChoice("auto")
    assert read_tool_choice("required", TOOLS) == ToolChoice("required")
    named = {"type": "function", "function": {"name": "now"}}
    assert read_tool_choice(named, TOOLS) == ToolChoice("named", "now")
    assert refusal(read_tool_choice, named, TOOLS[:1]).param == "tool_choice.function.name"
    for choice in ("auto", "required", named):
        assert refusal(read_tool_choice, choice, []).param == "tool_choice"
    for wrong in ("any", {}, {"type": "function"}, {"type": "function", "function": {"name": 5}}):
        assert refusal(read_tool_choice, wrong, TOOLS).param == "tool_choice"


def test_what_was_compiled_is_remembered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(capacity=2)
    compiled: list[str] = []

    class Counting:
        grammar_from_lark = staticmethod(LLMatcher.grammar_from_lark)

        def __new__(cls, tokenizer: LLTokenizer, grammar: str, log_level: int) -> LLMatcher:  # type: ignore[misc]
            compiled.append(grammar)
            return LLMatcher(tokenizer, grammar, log_level=log_level)

    monkeypatch.setattr("gateway.structured.LLMatcher", Counting)
    for choice in ("a", "a", "b", "a", "c", "a", "b"):  # b had to go for c
        grammars.of_choice([choice], "p")
    assert len(compiled) == 4
    bad = {"type": "objec"}
    messages = {refusal(grammars.of_schema, bad, "p").message for _ in range(3)}
    assert len(messages) == 1
    assert len(compiled) == 5
    grammars.of_choice(["long" * 10_000], "p")
    assert sum(len(name) + len(error) for name, error in grammars._errors.items()) < 500


def test_what_takes_long_to_compile_is_refused_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.structured.MAX_COMPILE_SECONDS", 0.0)
    grammars = Grammars()
    messages = {refusal(grammars.of_schema, {"type": "integer"}, "p").message for _ in range(2)}
    assert len(messages) == 1
    assert "to compile" in messages.pop()


def test_the_largest_schemas_are_compiled_in_bounded_time_and_by_many_threads() -> None:
    properties = {f"p{i}": {"enum": [f"value {i} {j}" for j in range(10)]} for i in range(700)}
    schemas = [{"type": "object", "properties": {**properties, f"q{i}": {"type": "string"}}} for i in range(4)]
    assert MAX_SCHEMA_BYTES * 0.7 < len(json.dumps(schemas[0])) < MAX_SCHEMA_BYTES
    start = time.process_time()
    with ThreadPoolExecutor(4) as pool:
        grammars = list(pool.map(lambda schema: Grammars().of_schema(schema, "p"), schemas))
    assert len(set(grammars)) == 4
    assert time.process_time() - start < 10

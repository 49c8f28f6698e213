"""Tool calls out of text: every format, however the text is cut; what is no call stays content."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tool_calls import (
    HERMES,
    LLAMA,
    ArgumentsDelta,
    CallStart,
    Content,
    Event,
    ToolCallParser,
    ToolFormat,
    detect_format,
)
from tests.gateway.pieces import cut, cuts

Calls = list[tuple[str, str]]


def events(form: ToolFormat, pieces: list[str]) -> list[Event]:
    counter = itertools.count()
    parser = ToolCallParser(form, new_id=lambda: f"call_{next(counter)}")
    found = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert parser.num_calls == sum(isinstance(event, CallStart) for event in found)
    return found


def parse(form: ToolFormat, pieces: list[str]) -> tuple[str, Calls]:
    """The content, and name and arguments of each call; checks ids and the order of events on the way."""
    content, calls = "", Calls()
    for event in events(form, pieces):
        match event:
            case Content(text):
                assert text
                content += text
            case CallStart(index, call_id, name):
                assert (index, call_id) == (len(calls), f"call_{len(calls)}")
                calls.append((name, ""))
            case ArgumentsDelta(index, text):
                assert text
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}\\"</tool_call>"}]}}\n</tool_call>'
F = '{"a": [1, {"b": "}\\"</tool_call>"}]}'
HERMES_CASES: list[tuple[str, str, Calls]] = [
    ("plain text\n", "plain text\n", []),
    (" \n", " \n", []),
    (ONE, "", [("f", F)]),
    ("Let me see.\n\n" + ONE + "\n", "Let me see.", [("f", F)]),
    (ONE + "\n" + ONE, "", [("f", F), ("f", F)]),
    (ONE + ONE + " so it is", " so it is", [("f", F), ("f", F)]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ('<tool_call>{"name": "f", "arguments": null, "id": 12}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', "", [("f", "{}"), ("g", "{}")]),
    # as it was when tokens ran out: a call that has begun stays one
    ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ('<tool_call>{"name": "f", "arguments": {}}</tool', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    # what is no call
    ("a <tool_", "a <tool_", []),
    ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    ('<tool_call>{"nme": "f"}</tool_call>', '<tool_call>{"nme": "f"}</tool_call>', []),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    (
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        [],
    ),
    ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
    ('<tool_call>{"\n": 1}', '<tool_call>{"\n": 1}', []),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ('<tool_call>{"x"<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"x"', [("f", "{}")]),
    # a call and then something odd
    ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}</tool_call>", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}} or so', " or so", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}, 5}</tool_call>', "5}</tool_call>", [("f", "{}")]),
]
LLAMA_CASES: list[tuple[str, str, Calls]] = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    ('{"name": "f", "parameters": {}} and', " and", [("f", "{}")]),
    ('{"name": "f", "parameters": {"a', "", [("f", '{"a')]),
    # answers that are no calls
    ("plain text\n", "plain text\n", []),
    ('{"answer": 42}', '{"answer": 42}', []),
    ('{"name": "Bob"}', '{"name": "Bob"}', []),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("<|python", "<|python", []),
    ("", "", []),
]
CASES = [(HERMES, *case) for case in HERMES_CASES] + [(LLAMA, *case) for case in LLAMA_CASES]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_parse(form: ToolFormat, text: str, content: str, calls: Calls) -> None:
    assert parse(form, [text]) == (content, calls)
    assert parse(form, list(text)) == (content, calls)


fragments = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f", ', '"arguments": ', '"parameters": ', "{", "}"]
        + ['"', "[", "]", ",", ";", " ", "\n", "\\", "<", "é", '{"a": 1}', ":", "null", '"name"', ONE]
    ),
    max_size=14,
)


@settings(max_examples=300)
@given(fragments.map("".join), cuts, st.sampled_from([HERMES, LLAMA]))
def test_any_pieces_give_what_the_whole_text_gives(text: str, at: list[int], form: ToolFormat) -> None:
    assert parse(form, cut(text, at)) == parse(form, [text])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
calls_lists = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    min_size=1,
    max_size=4,
)


@given(calls_lists, st.sampled_from([HERMES, LLAMA]), st.booleans(), st.sampled_from([None, 1]), cuts)
def test_what_a_model_writes_in_its_format_is_read_back(
    calls: list[tuple[str, dict[str, Any]]], form: ToolFormat, ascii_only: bool, indent: int | None, at: list[int]
) -> None:
    texts = [
        json.dumps({"name": name, form.arguments: arguments}, ensure_ascii=ascii_only, indent=indent)
        for name, arguments in calls
    ]
    content, found = parse(form, cut(form.between.join(form.open + text + form.close for text in texts), at))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.feed('I look.\n<tool_call>{"name": "f", "arguments"') == [Content("I look.")]
    start, arguments = parser.feed(': {"a')
    assert isinstance(start, CallStart)
    assert start.name == "f"
    assert start.id.startswith("call_")
    assert arguments == ArgumentsDelta(0, '{"a')
    assert parser.feed('": 1') == [ArgumentsDelta(0, '": 1')]
    assert parser.feed("}}</tool_call>") == [ArgumentsDelta(0, "}")]
    assert parser.finish() == []


def test_ids_differ() -> None:
    found = [event for _ in range(50) for event in ToolCallParser(HERMES).feed(ONE) if isinstance(event, CallStart)]
    assert len({event.id for event in found}) == 50


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('{% if tools %}Answer with <tool_call>\\n{"name": …}\\n</tool_call>{% endif %}', HERMES),
        ('{% if tools %}Respond as {"name": …, "parameters": …}{% endif %}<|python_tag|>', LLAMA),
        ("{% if tools %}<tool_call><function=name><parameter=a>1</parameter>{% endif %}", None),
        ("{% if tools %}<tool_call>name<arg_key>a</arg_key>{% endif %}", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_template_tells_its_format(template: str, form: ToolFormat | None) -> None:
    assert detect_format(template) == form

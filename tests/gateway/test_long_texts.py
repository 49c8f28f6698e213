"""What a client wrote at length costs no more than reading it, and errors do not repeat it whole.

The bounds on time are some hundred times what it takes, and a small part of what each took in another way.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, product

import pytest

from gateway.chat_template import ChatTemplate, Segment
from gateway.dialects.openai_chat import parse_chat
from gateway.errors import InvalidRequest
from gateway.generate_prompt import cut_behind
from gateway.schema_bounds import check_schema

MAX_SECONDS = 2.0
LONG = 1_000_000
MESSAGES = [{"role": "user", "content": "a"}]


@contextmanager
def soon() -> Iterator[None]:
    start = time.thread_time()
    yield
    assert time.thread_time() - start < MAX_SECONDS


def refused(body: dict[str, object]) -> InvalidRequest:
    with soon(), pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({"model": "chat", "messages": MESSAGES} | body).encode())
    return caught.value


@pytest.mark.parametrize("name", [" - at `$" * (LONG // 8), " - at `$`" * (LONG // 9) + "\n", "k" * LONG, "`" * LONG])
@pytest.mark.parametrize("where", ["stream_options", "structured_outputs", ""])
def test_a_long_name_of_a_field(where: str, name: str) -> None:
    error = refused({where: {name: True}} if where else {name: True})
    assert error.param is not None
    assert error.param.startswith(f"{where}.{name[:50]}" if where else name[:50])
    assert len(error.param) < 130
    assert len(error.message) < 200
    assert error.message.endswith("leave it out")


def test_a_long_name_within_a_list() -> None:
    error = refused({"messages": [MESSAGES[0] | {"k" * LONG: 1}]})
    assert error.param is not None
    assert error.param.startswith("messages[0].kkk")
    assert len(error.message) < 200


def test_what_a_template_repeats_is_cut() -> None:
    for source in ("{{ raise_exception(messages[0].content) }}", "{{ {}[messages[0].content].x.y }}"):
        with soon(), pytest.raises(InvalidRequest) as caught:
            ChatTemplate({"default": source}).segments([{"role": "user", "content": "kx" * LONG}])
        assert len(caught.value.message) < 400


def test_the_last_message_is_found_in_text_that_is_much_like_it() -> None:
    like = "a" * LONG
    content = "a</think>" + like[: LONG // 2]
    segments = [Segment(content + like, False)]
    with soon():
        assert cut_behind(segments, content) == [Segment(content, False)]
    with soon(), pytest.raises(InvalidRequest):
        cut_behind([Segment(like, False)], content)


def test_a_place_in_a_schema_is_weighed_once_however_it_is_spelled() -> None:
    name = "abcdefghijkl"
    spelled = (
        "".join(f"%{ord(char):02x}" if coded else char for char, coded in zip(name, bits, strict=True))
        for bits in islice(product([False, True], repeat=len(name)), 2000)
    )
    schema = {name: {"allOf": [{} for _ in range(10_000)]}, "allOf": [{"$ref": f"#/{ref}"} for ref in spelled]}
    with soon():
        check_schema(schema, "guided_json")


def test_a_reference_to_an_item_of_a_huge_number() -> None:
    with pytest.raises(InvalidRequest, match="leads nowhere"):
        check_schema({"prefixItems": [{}], "allOf": [{"$ref": "#/prefixItems/" + "9" * 5000}]}, "guided_json")

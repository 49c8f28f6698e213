"""Streams under load: every byte boundary is the same to the parser, and what is timed is what came."""

import asyncio

import pytest

from bench.client import HttpError
from bench.load import LoadError
from bench.sse import StreamParser
from bench.streams import complete, stream_prompts
from tests.bench.fake_streams import GAP_S, FakeStreams

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
# an event in two chunks, a comment, two events and the end in one
CHUNKS = [b'data: {"a":1', b"}\n\n", b": still here\n\n", b"data: {}\n\ndata: x\n\ndata: [DONE]\n\n", b""]
ANSWER = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in CHUNKS)
EVENTS = [b'{"a":1}', b"{}", b"x"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_events_come_however_the_bytes_are_cut(size: int) -> None:
    parser = StreamParser()
    events = [event for at in range(0, len(ANSWER), size) for event in parser.feed(ANSWER[at : at + size])]
    assert events == EVENTS
    assert parser.done
    assert parser.keep_alive
    assert parser.refused is None


def test_a_refusal_is_an_answer_and_no_event() -> None:
    parser = StreamParser()
    head = b"HTTP/1.1 429 Too Many\r\nConnection: close\r\nContent-Length: 12\r\n\r\n"
    assert parser.feed(head + b"data: x\n\n") == []
    assert not parser.done
    assert parser.feed(b"yes") == []
    assert parser.refused is not None
    assert (parser.refused.status, parser.refused.body) == (429, b"data: x\n\nyes")
    assert not parser.keep_alive


@pytest.mark.parametrize(
    "data", [b"GARBAGE\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", ANSWER.replace(b"c\r\ndata", b"zz\r\ndata"), b"x" * 70_000]
)
def test_what_is_no_stream(data: bytes) -> None:
    with pytest.raises(HttpError):
        StreamParser().feed(data)


async def test_streams_are_timed_token_by_token() -> None:
    server = FakeStreams()
    prompts = [[index] * 5 for index in range(8)]
    async with server.serve() as url:
        result = await asyncio.to_thread(stream_prompts, url, "m", prompts, 4, 3, 2)
    assert len(result.first_ms) == len(result.latencies_ms) == len(result.num_tokens) == 6  # two were warm-up
    assert len(result.gaps_ms) == 6 * 3
    assert result.num_tokens == [4] * 6
    assert min(result.first_ms) >= GAP_S * 1000
    assert min(result.latencies_ms) >= 4 * GAP_S * 1000
    assert sum(result.gaps_ms) == pytest.approx(sum(result.latencies_ms) - sum(result.first_ms), abs=0.1)
    assert server.most_in_flight == 3
    assert sorted(body["prompt"] for body in server.bodies) == prompts  # each once
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    assert all(fields.items() <= body.items() for body in server.bodies)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("refuse", "429"), ("error", "lost"), ("cut", "in the middle of a stream"), ("short", "had 3 tokens")],
)
async def test_a_stream_that_goes_wrong_is_no_sample(fault: str, message: str) -> None:
    async with FakeStreams(fault).serve() as url:
        with pytest.raises(LoadError, match=message):
            await asyncio.to_thread(stream_prompts, url, "m", [[1], [2]], 4, 1, 0)


async def test_a_whole_answer() -> None:
    async with FakeStreams().serve() as url:
        assert await asyncio.to_thread(complete, url, "m", [1, 2, 3], 4) == "after 3"
    async with FakeStreams("refuse").serve() as url:
        with pytest.raises(LoadError, match="429"):
            await asyncio.to_thread(complete, url, "m", [1], 4)

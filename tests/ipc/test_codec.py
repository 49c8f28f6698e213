"""Every message survives its link, no link takes another's, and no bytes do more than raise DecodeError."""

import math
import types
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from ipc import codec
from ipc.codec import FROM_RANK, MEMBERSHIP, TO_GATEWAY, TO_RANK, TO_SCHEDULER, DecodeError, Decoder, encode
from ipc.control import Hello
from ipc.step import StepPlan
from ipc.submit import Abort, Submit
from ipc.types import SamplingParams

CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
LINKS: dict[str, tuple[Decoder[Any], types.UnionType]] = {
    "to_scheduler": (TO_SCHEDULER, codec.ToScheduler),
    "to_gateway": (TO_GATEWAY, codec.ToGateway),
    "to_rank": (TO_RANK, codec.ToRank),
    "from_rank": (FROM_RANK, codec.FromRank),
    "membership": (MEMBERSHIP, codec.Membership),
}
MESSAGES = sorted({kind for _, union in LINKS.values() for kind in get_args(union)}, key=lambda kind: kind.__name__)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Every value that a field of this type may have."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low, le=high):
            return st.integers(-(2**63) if low is None else low, 2**63 - 1 if high is None else high)
        case inspect.FloatType(ge=low, gt=above, le=high):
            low = above if low is None else low
            return st.floats(low, high, exclude_min=above is not None, allow_nan=False)
        case inspect.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=choices):
            return st.sampled_from(choices)
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=4)
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=4).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=4)
        case inspect.UnionType(types=kinds):
            return st.one_of(*map(values, kinds))
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
    raise AssertionError(f"no values for {kind}: a message must be made of plain data")


def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return values(inspect.type_info(kind))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@settings(CALM, max_examples=40)
@given(data=st.data())
def test_a_message_survives_its_links_and_no_others(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    frame = encode(message)
    for decoder, union in LINKS.values():
        if kind in get_args(union):
            assert decoder.decode(frame) == message
            assert decoder.decode(memoryview(frame)) == message
        else:
            with pytest.raises(DecodeError):
                decoder.decode(frame)


def decode_everywhere(frame: bytes) -> None:
    for decoder, union in LINKS.values():
        try:
            message = decoder.decode(frame)
        except DecodeError:
            continue
        assert type(message) in get_args(union)


@settings(CALM, max_examples=300)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 100_000)  # nested arrays
@example(b"\x83\xa4type\xa5Abort\xa1q" + b"\x91" * 100_000)  # … in a field that is skipped
@example(b"\xdf\xff\xff\xff\xff")  # a map of 2³² - 1 entries
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x82\xa4type\xa5Abort\xc7\x01\x05x\x01")  # an extension type
@example(b"\x81\xa4type\xa4None")
@example(b"\x81\xa4type\xc0")
@example(b"\x81\xa4type\xd9\xff")
def test_no_bytes_raise_anything_but_decode_error(frame: bytes) -> None:
    decode_everywhere(frame)


@settings(CALM, max_examples=100)
@given(st.sampled_from(MESSAGES).flatmap(messages), st.data())
def test_no_damage_raises_anything_but_decode_error(message: msgspec.Struct, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    decode_everywhere(bytes(frame))
    for end in range(0, len(frame), max(1, len(frame) // 20)):
        decode_everywhere(bytes(frame[:end]))


def changed(message: msgspec.Struct, **fields: object) -> bytes:
    """`message` with fields of any type and size, as another program might send it."""
    body = {"type": type(message).__name__, **msgspec.to_builtins(message), **fields}
    return msgspec.msgpack.encode(body)


SUBMIT = Submit(gateway=1, scheduler=2, chunk_id=3, lengths=[2, 3], timeout_ms=100)
PLAN = StepPlan(epoch=1, step=2, slot=0, kind="generate")


@pytest.mark.parametrize(
    ("decoder", "frame"),
    [
        (TO_SCHEDULER, changed(SUBMIT, gateway=-1)),
        (TO_SCHEDULER, changed(SUBMIT, gateway=2**63)),
        (TO_SCHEDULER, changed(SUBMIT, chunk_id="3")),
        (TO_SCHEDULER, changed(SUBMIT, chunk_id=3.5)),
        (TO_SCHEDULER, changed(SUBMIT, lengths=[2**31])),
        (TO_SCHEDULER, changed(SUBMIT, lengths=[-1])),
        (TO_SCHEDULER, changed(SUBMIT, lengths=[[1]])),
        (TO_SCHEDULER, changed(SUBMIT, lengths=None)),
        (TO_SCHEDULER, changed(SUBMIT, timeout_ms=-5)),
        (TO_SCHEDULER, changed(SUBMIT, priority="urgent")),
        (TO_SCHEDULER, changed(SUBMIT, sampling={"temperature": math.nan})),
        (TO_SCHEDULER, changed(SUBMIT, sampling={"temperature": math.inf})),
        (TO_SCHEDULER, changed(SUBMIT, sampling={"top_p": 1.5})),
        (TO_SCHEDULER, changed(SUBMIT, sampling={"logit_bias": {5: math.nan}})),
        (TO_SCHEDULER, changed(SUBMIT, sampling={"logit_bias": {-1: 1.0}})),
        (TO_SCHEDULER, changed(SUBMIT, sampling={"logprobs": 21})),
        (TO_RANK, changed(PLAN, slot=-1)),
        (TO_RANK, changed(PLAN, num_seqs=2**40)),
        (TO_RANK, changed(PLAN, epoch=2**64 - 1)),
        (TO_RANK, changed(PLAN, kind="pickle")),
        (MEMBERSHIP, changed(Hello(1, "rank", 0, 1), index=-1)),
    ],
)
def test_numbers_and_words_out_of_bounds_are_refused(decoder: Decoder[Any], frame: bytes) -> None:
    with pytest.raises(DecodeError):
        decoder.decode(frame)


def test_the_frames_above_are_refused_for_their_one_field() -> None:
    assert TO_SCHEDULER.decode(changed(SUBMIT)) == SUBMIT
    assert TO_RANK.decode(changed(PLAN)) == PLAN
    params = {"temperature": 1.5, "logit_bias": {5: -3}}
    submit = TO_SCHEDULER.decode(changed(SUBMIT, sampling=params))
    assert isinstance(submit, Submit)
    assert submit.sampling == SamplingParams(temperature=1.5, logit_bias={5: -3.0})


def test_a_field_of_a_later_version_is_skipped() -> None:
    assert TO_SCHEDULER.decode(changed(SUBMIT, colour="blue")) == SUBMIT


def test_an_integer_beyond_64_bits_cannot_be_sent() -> None:
    with pytest.raises(OverflowError):
        encode(Abort(gateway=2**70, scheduler=1, chunk_id=1))

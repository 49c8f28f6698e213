"""One encoder, and one typed decoder per link. A decoder takes no type that its link does not speak."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from ipc.control import Drain, Heartbeat, Hello, Join, Quarantine, Status
from ipc.step import Ready, Shutdown, StepFailed, StepPlan, StepResult
from ipc.submit import Abort, Rejected, Result, Submit, TokenChunk

ToScheduler = Hello | Heartbeat | Submit | Abort | Quarantine  # from a gateway
ToGateway = Status | Result | TokenChunk | Rejected | Quarantine
ToRank = StepPlan | Shutdown
FromRank = Ready | StepResult | StepFailed | Heartbeat | Drain
Membership = Hello | Join  # over the Unix socket that also carries the ring

DecodeError = msgspec.DecodeError  # of which msgspec.ValidationError is a kind

_encoder = msgspec.msgpack.Encoder()

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


class Decoder(Generic[T]):
    """One link's decoder. Whatever bytes come, they give a message of that link or a DecodeError."""

    def __init__(self, union: Any) -> None:
        self._decode: Callable[[Buffer], T] = msgspec.msgpack.Decoder(union).decode

    def decode(self, frame: Buffer) -> T:
        try:
            return self._decode(frame)
        except RecursionError:
            raise DecodeError("message nested too deeply") from None


TO_SCHEDULER: Decoder[ToScheduler] = Decoder(ToScheduler)
TO_GATEWAY: Decoder[ToGateway] = Decoder(ToGateway)
TO_RANK: Decoder[ToRank] = Decoder(ToRank)
FROM_RANK: Decoder[FromRank] = Decoder(FromRank)
MEMBERSHIP: Decoder[Membership] = Decoder(Membership)


def encode(message: Struct) -> bytes:
    """`message` as msgpack. Raises OverflowError for an int beyond 64 bits."""
    return _encoder.encode(message)

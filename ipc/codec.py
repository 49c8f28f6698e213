"""One encoder, and one typed decoder per link. A decoder takes no type that its link does not speak."""

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

_encoder = msgspec.msgpack.Encoder()
encode_into = _encoder.encode_into

TO_SCHEDULER: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
TO_GATEWAY: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
MEMBERSHIP: msgspec.msgpack.Decoder[Membership] = msgspec.msgpack.Decoder(Membership)

DecodeError = msgspec.DecodeError  # of which msgspec.ValidationError is a kind


def encode(message: Struct) -> bytes:
    """`message` as msgpack. Raises OverflowError for an int beyond 64 bits."""
    return _encoder.encode(message)

"""What every kind of socket here has in common: its bounds, and what can go wrong when sending."""

from collections.abc import Sequence

from ipc.endpoint_lock import EndpointInUse, SocketError

__all__ = ["EndpointInUse", "Frame", "MessageTooLarge", "PeerFull", "PeerGone", "SocketError", "check_size"]

HIGH_WATER_MARK = 4096  # messages per peer and direction
MAX_MESSAGE_BYTES = 256 << 20  # of one frame

Frame = bytes | bytearray | memoryview


class PeerFull(SocketError):
    """The peer's queue is at its high-water mark, or a DEALER is not connected; the message was not sent."""


class PeerGone(SocketError):
    """Nobody is connected under that identity; the message was not sent."""


class MessageTooLarge(SocketError):
    """A frame is beyond MAX_MESSAGE_BYTES, or there are too many (or none): the receiver would cut the connection."""


def check_size(frames: Sequence[Frame]) -> None:
    """Raises MessageTooLarge."""
    for frame in frames:
        num_bytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if num_bytes > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(f"a frame of {num_bytes} bytes, the limit is {MAX_MESSAGE_BYTES}")

"""A request's sequences into chunks: bounded in tokens, and enough of them to keep every replica busy."""

from array import array

from msgspec import Struct

from gateway.tasks import Encoded

MIN_CHUNK_TOKENS = 2048  # a smaller one is not worth a message of its own


class ChunkInput(Struct):
    """What one Submit carries. `first` is the place of its first sequence in the request."""

    first: int
    lengths: list[int]
    frame: bytes
    type_starts: list[int]
    num_tokens: int


def split(encoded: Encoded, max_chunk_tokens: int, num_replicas: int = 1) -> list[ChunkInput]:
    """Consecutive chunks of at most `max_chunk_tokens`; a longer sequence has a chunk to itself."""
    sequences = encoded.sequences
    if len(sequences) == 1:
        return [_chunk(encoded, 0, 1)]
    share = -(-encoded.num_tokens // max(num_replicas, 1))
    limit = min(max_chunk_tokens, max(share, MIN_CHUNK_TOKENS))
    chunks, first, num_tokens = [], 0, 0
    for i, sequence in enumerate(sequences):
        if num_tokens and num_tokens + len(sequence) > limit:
            chunks.append(_chunk(encoded, first, i))
            first, num_tokens = i, 0
        num_tokens += len(sequence)
    chunks.append(_chunk(encoded, first, len(sequences)))
    return chunks


def _chunk(encoded: Encoded, first: int, end: int) -> ChunkInput:
    lengths, ids = [], array("i")
    for sequence in encoded.sequences[first:end]:
        lengths.append(len(sequence))
        ids.fromlist(sequence)
    return ChunkInput(first, lengths, ids.tobytes(), encoded.type_starts[first:end], len(ids))

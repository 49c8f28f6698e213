"""Names for the content of full blocks: a chain of digests over a sequence's tokens.

A block's keys and values depend on every token before it, so its name does as well: blake2b-128 of its predecessor's
name and its own ids. The chain begins with the request's salt; without the same salt nothing is found.

Where there may be drafts, a name takes in the first token behind the block, too: a draft head's entry at a position
depends on the token after it (`lookahead`, 1 or 0). A block is then offered once that token is known.
"""

import hashlib

from scheduler.llm.blocks import BlockPool
from scheduler.llm.sequence import Sequence

DIGEST_BYTES = 16
SHARED_TOKENS = 64  # so many are worth waiting for while they are computed for somebody else


def find_hits(sequence: Sequence, blocks: BlockPool, block_size: int, lookahead: int) -> list[int]:
    """The blocks that hold the beginning of `sequence`, all but its last token at most."""
    hits = []
    for index in range((len(sequence.ids) - 1) // block_size):
        block = blocks.find(_digest(sequence, index, block_size, lookahead))
        if block is None:
            break
        hits.append(block)
    return hits


def register(sequence: Sequence, blocks: BlockPool, block_size: int, lookahead: int, num_tokens: int) -> None:
    """Offers the full blocks among the first `num_tokens` tokens, whose steps were answered, for hits."""
    num_tokens = min(num_tokens, len(sequence.ids) - lookahead)
    for index in range(sequence.num_registered, num_tokens // block_size):
        blocks.register(sequence.blocks[index], _digest(sequence, index, block_size, lookahead))
        sequence.num_registered = index + 1


def next_name(sequence: Sequence, num_blocks: int, end: int, block_size: int, lookahead: int) -> bytes | None:
    """What the SHARED_TOKENS behind its first `num_blocks` are called, with all before them; None if `end` is before
    their end, or they are not known yet."""
    index = num_blocks + max(SHARED_TOKENS // block_size, 1) - 1
    end = min(end, len(sequence.ids) - lookahead)
    return _digest(sequence, index, block_size, lookahead) if (index + 1) * block_size <= end else None


def _digest(sequence: Sequence, index: int, block_size: int, lookahead: int) -> bytes:
    digests = sequence.digests
    while len(digests) <= index:
        start = len(digests) * block_size
        parent = digests[-1] if digests else _digest_of(sequence.submit.cache_salt)
        digests.append(_digest_of(parent + sequence.ids[start : start + block_size + lookahead].tobytes()))
    return digests[index]


def _digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()

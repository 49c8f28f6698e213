"""The blocks of the ranks' memory for keys and values: who holds which, and what lies in those that nobody holds.

A block that nobody holds keeps its content, and can be found by it, until it is taken again: empty ones are taken
first, then those longest unused. Knows nothing of tokens; a content is a digest (prefix_cache.py).
"""

from collections import OrderedDict
from collections.abc import Sequence as Many


class BlockPool:
    """Blocks 0 … num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_holders = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # nobody's, without content
        self._idle: OrderedDict[int, None] = OrderedDict()  # nobody's, with content; longest unused first
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._empty) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their content, held or not."""
        return len(self._block_of)

    def take(self, count: int) -> list[int]:
        """Blocks to write to, with one holder each; the caller has looked at `num_free`."""
        empty = self._empty
        blocks = [empty.pop() if empty else self._evict() for _ in range(count)]
        for block in blocks:
            self.num_holders[block] = 1
        return blocks

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def num_idle_among(self, blocks: Many[int]) -> int:
        """How many of `blocks` nobody holds: `share` takes them from the free ones."""
        return sum(self.num_holders[block] == 0 for block in blocks)

    def share(self, blocks: Many[int]) -> None:
        """One more holder for each of these, found by content."""
        for block in blocks:
            if self.num_holders[block] == 0:
                del self._idle[block]
            self.num_holders[block] += 1

    def give_back(self, blocks: Many[int]) -> None:
        """One holder less for each. The last of a sequence are taken again first: its beginning is worth most."""
        for block in reversed(blocks):
            self.num_holders[block] -= 1
            assert self.num_holders[block] >= 0, f"block {block} given back twice"
            if self.num_holders[block] == 0:
                if block in self._digest_of:
                    self._idle[block] = None
                else:
                    self._empty.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """What `block`, which is full and held, contains. The first block of a content is the one that is found."""
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest], self._digest_of[block] = block, digest

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block

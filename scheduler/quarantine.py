"""What is known of sequences that were in flight when ranks died, by fingerprint: suspects and convicts.

Suspicion outlives the request, so that a client that gives up early and asks again does not end ranks for ever. A
fingerprint covers token ids and everything else that shapes the computation. Time is an argument.
"""

import hashlib
from collections import OrderedDict

from msgspec.structs import replace

from ipc.codec import encode
from scheduler.request import Request

DIGEST_BYTES = 16
MAX_ENTRIES = 1024  # convicts; the oldest leave first
MAX_SUSPECTS = 4096
MAX_STRIKES = 2  # deaths while running alone


class Quarantine:
    """`version` grows with the convicts; `take_news` hands out those found here, once."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.version = 0
        self._convicts: OrderedDict[bytes, float] = OrderedDict()  # fingerprint → until when, soonest first by age
        self._suspects: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # → strikes, until when
        self._news: list[bytes] = []

    def __len__(self) -> int:
        return len(self._convicts)

    # --- suspects -------------------------------------------------------------------------------------------

    def suspect(self, request: Request, row: int, now: float) -> None:
        """Ranks died while this row was in flight with others."""
        self._count(fingerprint(request, row), 0, now)

    def strike(self, request: Request, row: int, now: float) -> int:
        """Ranks died while this row ran alone; returns how often that was since it was last cleared."""
        return self._count(fingerprint(request, row), 1, now)

    def clear(self, request: Request, row: int) -> None:
        """It ran alone and they lived."""
        self._suspects.pop(fingerprint(request, row), None)

    def suspected(self, request: Request, now: float) -> list[int]:
        """The rows of `request` that must run alone. Costs nothing while nothing is suspected."""
        _forget(self._suspects, [found for found, (_, until) in self._suspects.items() if until <= now])
        if not self._suspects:
            return []
        return [row for row in range(request.num_rows) if fingerprint(request, row) in self._suspects]

    # --- convicts -------------------------------------------------------------------------------------------

    def convict(self, request: Request, row: int, now: float) -> None:
        """A row was found to end ranks here."""
        found = fingerprint(request, row)
        self._suspects.pop(found, None)
        self._insert(found, now + self.ttl_ms / 1000)
        self._news.append(found)

    def accept(self, fingerprints: list[bytes], ttl_ms: int, now: float) -> None:
        """Takes what another scheduler found. Idempotent, and no news of our own."""
        for found in fingerprints[:MAX_ENTRIES]:
            if len(found) == DIGEST_BYTES:
                self._insert(found, now + min(ttl_ms, self.ttl_ms) / 1000)

    def take_news(self) -> list[bytes]:
        news, self._news = self._news, []
        return news

    def entries(self, now: float) -> list[tuple[bytes, int]]:
        """(fingerprint, remaining ms) of all convicts."""
        _forget(self._convicts, [found for found, until in self._convicts.items() if until <= now])
        return [(found, int((until - now) * 1000)) for found, until in self._convicts.items()]

    def match(self, request: Request, now: float) -> int | None:
        """The first convicted row of `request`. Costs nothing while nobody is convicted."""
        if not self._convicts or not self.entries(now):
            return None
        return next((row for row in range(request.num_rows) if fingerprint(request, row) in self._convicts), None)

    # --- details --------------------------------------------------------------------------------------------

    def _count(self, found: bytes, strikes: int, now: float) -> int:
        strikes += self._suspects.get(found, (0, 0.0))[0]
        self._suspects[found] = (strikes, now + self.ttl_ms / 1000)
        if len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        return strikes

    def _insert(self, found: bytes, until: float) -> None:
        if until > self._convicts.get(found, 0.0):
            self.version += found not in self._convicts
            self._convicts[found] = until
            if len(self._convicts) > MAX_ENTRIES:
                self._convicts.popitem(last=False)


def _forget(table: "OrderedDict[bytes, float] | OrderedDict[bytes, tuple[int, float]]", expired: list[bytes]) -> None:
    for found in expired:
        del table[found]


def refusal_message(row: int) -> str:
    return f"sequence {row} ended {MAX_STRIKES} processes while it ran alone: it is refused for a while"


def fingerprint(request: Request, row: int) -> bytes:
    """blake2b-128 of a row's ids, its token types and the output asked for, but for a seed that was drawn at random."""
    type_starts = request.submit.type_starts
    digest = hashlib.blake2b(request.row_ids(row).tobytes(), digest_size=DIGEST_BYTES)
    digest.update(b"" if not type_starts else type_starts[row].to_bytes(8, "little"))
    digest.update(encode(request.submit.spec))
    if request.submit.sampling is not None:
        digest.update(encode(replace(request.submit.sampling, seed=None)))
    return digest.digest()

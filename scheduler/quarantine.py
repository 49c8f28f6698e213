"""Fingerprints of sequences that ended ranks while running alone: refused for a while, here and everywhere.

A fingerprint covers token ids and everything else that shapes the computation. Time is an argument.
"""

import hashlib
from collections import OrderedDict

from ipc.codec import encode
from scheduler.request import Request

MAX_ENTRIES = 1024  # the oldest leave first


class Quarantine:
    """The table. `version` grows when entries are added; `take_news` hands out those found here, once."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.version = 0
        self._expiry: OrderedDict[bytes, float] = OrderedDict()
        self._news: list[bytes] = []

    def __len__(self) -> int:
        return len(self._expiry)

    def convict(self, request: Request, row: int, now: float) -> None:
        """A row was found to end ranks here."""
        found = fingerprint(request, row)
        self._insert(found, now + self.ttl_ms / 1000)
        self._news.append(found)

    def accept(self, fingerprints: list[bytes], ttl_ms: int, now: float) -> None:
        """Takes what another scheduler found. Idempotent, and no news of our own."""
        for found in fingerprints[:MAX_ENTRIES]:
            self._insert(found, now + min(ttl_ms, self.ttl_ms) / 1000)

    def take_news(self) -> list[bytes]:
        news, self._news = self._news, []
        return news

    def entries(self, now: float) -> list[tuple[bytes, int]]:
        """(fingerprint, remaining ms) of all."""
        self._forget(now)
        return [(found, int((expiry - now) * 1000)) for found, expiry in self._expiry.items()]

    def match(self, request: Request, now: float) -> int | None:
        """The first row of `request` in the table. Costs nothing while the table is empty."""
        if not self._expiry:
            return None
        self._forget(now)
        if not self._expiry:
            return None
        return next((row for row in range(request.num_rows) if fingerprint(request, row) in self._expiry), None)

    def _insert(self, found: bytes, expiry: float) -> None:
        if expiry > self._expiry.get(found, 0.0):
            if found not in self._expiry:
                self.version += 1
            self._expiry[found] = expiry
            if len(self._expiry) > MAX_ENTRIES:
                self._expiry.popitem(last=False)

    def _forget(self, now: float) -> None:
        for found in [found for found, expiry in self._expiry.items() if expiry <= now]:
            del self._expiry[found]


def fingerprint(request: Request, row: int) -> bytes:
    """blake2b-128 of a row's ids, its token types and the output asked for."""
    type_starts = request.submit.type_starts
    digest = hashlib.blake2b(request.row_ids(row).tobytes(), digest_size=16)
    digest.update(b"" if not type_starts else type_starts[row].to_bytes(8, "little"))
    digest.update(encode(request.submit.spec))
    return digest.digest()

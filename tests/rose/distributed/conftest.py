"""The two processes, made once: starting them takes longer than all that is done with them."""

from collections.abc import Iterator

import pytest

from tests.rose.distributed.ranks import Ranks, two_ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    with two_ranks() as made:
        yield made


class Kept:
    """A pair that lasts from test to test, as long as both answer."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None


@pytest.fixture(scope="package")
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.close()


@pytest.fixture
def gpus(kept: Kept) -> Ranks:
    """Each with a GPU of its own. One that hangs takes its test with it, and no other."""
    if kept.ranks is not None and not kept.ranks.all_answer():
        kept.close()
    kept.ranks = kept.ranks or Ranks(gpus=True)
    return kept.ranks

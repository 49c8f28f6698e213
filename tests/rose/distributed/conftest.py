"""The two processes, made once: starting them takes longer than all that is done with them."""

from collections.abc import Iterator

import pytest

from tests.rose.distributed.ranks import Ranks, two_ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    with two_ranks() as made:
        yield made


@pytest.fixture(scope="package")
def gpus() -> Iterator[Ranks]:
    """Each with a GPU of its own."""
    with two_ranks(gpus=True) as made:
        yield made

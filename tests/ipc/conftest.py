"""A fresh endpoint and ZeroMQ context for each test."""

import tempfile
from collections.abc import Iterator

import pytest
import zmq

from tests.ipc.peers import Context


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"ipc://{folder}/r/x.sock"


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)

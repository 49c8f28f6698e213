"""Fresh endpoints and a ZeroMQ context for each test."""

import tempfile
from collections.abc import Iterator

import pytest
import zmq

from ipc.sockets import Context
from tests.ipc.peers import free_tcp_endpoint


@pytest.fixture
def local_endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"ipc://{folder}/r/x.sock"


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, local_endpoint: str) -> str:
    if request.param == "ipc":
        return local_endpoint
    return free_tcp_endpoint()


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(linger=0)

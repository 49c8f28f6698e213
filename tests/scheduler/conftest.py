"""The scheduler's tests run on the loop that it runs on."""

import pytest
import uvloop


@pytest.fixture(scope="session")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    return uvloop.EventLoopPolicy()

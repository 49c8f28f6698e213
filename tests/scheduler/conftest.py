"""The scheduler's tests run on the loop that it runs on."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from scheduler import loop


@pytest.hookimpl(optionalhook=True)  # of newer releases of pytest-asyncio; with others the tests run on asyncio's own
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next rank's start counts as no absence, however busy the machine."""
    monkeypatch.setattr(loop, "RANKS_BACK_S", 30.0)

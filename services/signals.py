"""SIGTERM and SIGINT as something a main loop can wait for."""

import asyncio
import os
import signal
from collections.abc import Iterable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_event(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """An event that the first stop signal sets. Call it inside the running loop."""
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    return stop


def stop_descriptor(signals: Iterable[signal.Signals] = STOP_SIGNALS) -> int:
    """An eventfd for a thread that polls descriptors: readable from the first of `signals` on; it counts them."""
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    for number in signals:
        signal.signal(number, lambda *_: os.eventfd_write(fd, 1))
    return fd

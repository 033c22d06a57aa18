"""How a call waits inside an engine: until it is its turn, the engine is closed, or the call is cancelled."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from messages.errors import Cancelled, EngineUnavailable

POLL_S = 0.1  # a waiting call checks again after this many seconds


def check_running(engine: str, closed: threading.Event, stop: threading.Event | None) -> None:
    """Raises EngineUnavailable once the engine is closed, and Cancelled once `stop` is set."""
    if closed.is_set():
        raise EngineUnavailable(f"the {engine} engine was closed")
    if stop is not None and stop.is_set():
        raise Cancelled("cancelled while the engine was working")


@contextmanager
def acquire_slot(slots: threading.Semaphore, check: Callable[[], None]) -> Iterator[None]:
    """Wait for a free slot. While waiting, calls `check`, which may raise."""
    check()
    while not slots.acquire(timeout=POLL_S):
        check()
    try:
        yield
    finally:
        slots.release()

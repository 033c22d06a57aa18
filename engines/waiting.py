"""How a call waits inside an engine: until it is its turn, the engine is closed, or it is told to stop."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from messages.errors import Cancelled, EngineUnavailable

POLL_S = 0.1  # how often whoever waits looks whether to go on


def check_running(engine: str, closed: threading.Event, stop: threading.Event | None) -> None:
    """Raises EngineUnavailable once the engine is closed, and Cancelled once `stop` is set."""
    if closed.is_set():
        raise EngineUnavailable(f"the {engine} engine was closed")
    if stop is not None and stop.is_set():
        raise Cancelled("cancelled while the engine was at work")


@contextmanager
def acquire_slot(slots: threading.Semaphore, check: Callable[[], None]) -> Iterator[None]:
    """One of the slots, as soon as it is free. Meanwhile it lets `check` raise."""
    check()
    while not slots.acquire(timeout=POLL_S):
        check()
    try:
        yield
    finally:
        slots.release()

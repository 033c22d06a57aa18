"""Waiting for a condition with a deadline, in place of sleeping for a guessed time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], description: str, timeout_s: float = 10.0, poll_s: float = 0.02) -> T:
    """Call `condition` until it returns something true, and return that.

    Raises AssertionError naming `description`, and what the condition last returned, after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain until {description}; last seen: {value!r:.200}")
        time.sleep(poll_s)
    return value

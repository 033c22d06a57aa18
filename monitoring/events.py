"""Passes the events that clients and workers report to observers.

A worker gets one `Observer` and calls it in its own threads, right after each step. FIRST_TOKEN is reported by the
decode worker. TTFT therefore includes both queues and the KV transfer, but not the way to the client.
"""

import logging
from collections.abc import Callable

from messages.lifecycle import Event

Observer = Callable[[Event], None]

log = logging.getLogger(__name__)


def fan_out(*observers: Observer) -> Observer:
    """Return one observer that calls all of these, in order. Their errors are logged, and never affect a job.

    Only the first failure of each observer is logged with its traceback, so that a broken one doesn't fill the disk.
    """
    broken_observers: set[int] = set()

    def observe(event: Event) -> None:
        for number, observer in enumerate(observers):
            try:
                observer(event)
            except Exception:
                if number in broken_observers:
                    log.debug("observer %r failed again", observer, exc_info=True)
                else:
                    broken_observers.add(number)
                    log.exception("observer %r failed; its further failures are logged at level debug", observer)

    return observe

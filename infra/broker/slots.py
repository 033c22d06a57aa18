"""The slots of a worker that does several jobs at once.

A job leaves its slot when the engine is done with it. Storing, publishing and acking what came of it take milliseconds
in which the next job is begun already.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

log = logging.getLogger(__name__)


class Slots:
    """`count` slots. One thread takes them; anybody may ask."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.done = 0  # jobs
        self._changed = threading.Condition()
        self._taken: set[object] = set()
        self._lent = 0  # slots that no delivery has, and a job with several answers uses
        self._threads: set[Future[None]] = set()
        self._pool = ThreadPoolExecutor(2 * count, thread_name_prefix="slot")

    @property
    def holding(self) -> int:
        """Groups of jobs whose thread still runs: only just being looked at, decoded, or leaving."""
        return len(self._threads)

    @property
    def free(self) -> int:
        """Slots not taken."""
        return self.count - len(self._taken)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether a slot is free, after `timeout_s` at most; None: as long as it takes.

        As many jobs again may be ending. If there are more, something holds up the ends, and no more are begun.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: len(self._taken) < self.count and len(self._threads) < 2 * self.count, timeout_s
            )

    def take(self, work: Callable[[Callable[[], None]], None], jobs: int = 1) -> None:
        """Do `work`, of so many jobs, in a slot; waits for one if there is none.

        It is given what leaves its slot, to be called early and more than once if need be; the slot is left when it
        returns, too. It must not raise.
        """
        self.wait(None)
        slot = object()

        def leave() -> None:
            with self._changed:
                self._taken.discard(slot)
                self._changed.notify_all()

        def done(future: Future[None]) -> None:
            if error := future.exception():
                log.error("bug in a slot: what it held comes back when this worker leaves", exc_info=error)
            leave()
            with self._changed:
                self.done += jobs
                self._threads.discard(future)
                self._changed.notify_all()

        with self._changed:
            self._taken.add(slot)
            future = self._pool.submit(work, leave)
            self._threads.add(future)
        future.add_done_callback(done)

    def lend(self, work: Callable[[], bool]) -> threading.Thread | None:
        """Do `work` in a slot that idles, and again as long as it returns True and no delivery has taken that slot.

        Deliveries come first: they are given slots as if none were lent, and one that finds the engine full waits for
        the end of `work`. The thread; None if no slot idles. `work` must not raise.
        """
        with self._changed:
            if len(self._taken) + self._lent >= self.count:
                return None
            self._lent += 1
        helper = threading.Thread(target=self._help, args=(work,), name="lent-slot", daemon=True)
        helper.start()
        return helper

    def _help(self, work: Callable[[], bool]) -> None:
        lent = True
        while lent:
            more = work()
            with self._changed:
                lent = more and len(self._taken) + self._lent <= self.count
                self._lent -= not lent

    def finish(self) -> None:
        """Return when no slot's thread runs any more. Answers may still be on their way out."""
        wait(list(self._threads))

    def close(self) -> None:
        """Wait for all, and take no more."""
        self._pool.shutdown()

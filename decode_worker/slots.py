"""A decode worker's slots: one for each job that is decoded at once.

A job leaves its slot when its answer is complete. Storing, publishing and acking that answer take milliseconds in
which the next job is begun already.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

log = logging.getLogger(__name__)


class Seat:
    """One job's place in a slot. `leave` may be called again and again; the first call counts."""

    def __init__(self, on_left: Callable[[], None]) -> None:
        self._on_left = on_left
        self._lock = threading.Lock()
        self.left = False

    def leave(self) -> None:
        """The slot may be given to the next job."""
        with self._lock:
            if self.left:
                return
            self.left = True
        self._on_left()


class Slots:
    """`count` slots. One thread takes them; anybody may ask."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.done = 0  # jobs
        self._room = threading.Semaphore(count)
        # As many again may be ending; more than that, and something holds up the ends: no more are begun.
        self._places = threading.Semaphore(2 * count)
        self._pool = ThreadPoolExecutor(2 * count, thread_name_prefix="slot")
        self._taken: dict[Future[None], Seat] = {}

    @property
    def holding(self) -> int:
        """Jobs that are not settled: in a slot, only just being looked at, or ending."""
        return len(self._taken)

    @property
    def free(self) -> int:
        """Slots not taken."""
        return max(0, self.count - sum(not seat.left for seat in list(self._taken.values())))

    def wait(self, timeout_s: float) -> bool:
        """Whether a slot is free, after `timeout_s` at most."""
        for room in (self._room, self._places):
            if not room.acquire(timeout=timeout_s):
                return False
            room.release()  # only one thread takes slots, so this one stays free
        return True

    def take(self, work: Callable[[Seat], None], jobs: int = 1) -> None:
        """Do `work`, of so many jobs, in a slot; waits for one if there is none.

        It leaves its seat early, or when it returns, and must not raise.
        """
        self._room.acquire()
        self._places.acquire()
        seat = Seat(self._room.release)
        future = self._pool.submit(work, seat)
        self._taken[future] = seat
        future.add_done_callback(partial(self._done, jobs))

    def finish(self) -> None:
        """Return when everything is settled."""
        wait(list(self._taken))

    def close(self) -> None:
        """Wait for all, and take no more."""
        self._pool.shutdown()

    def _done(self, jobs: int, future: Future[None]) -> None:
        if error := future.exception():
            log.error("bug in a slot: what it held comes back when this worker leaves", exc_info=error)
        seat = self._taken.pop(future)
        self.done += jobs
        self._places.release()
        seat.leave()

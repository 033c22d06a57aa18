"""What a decode worker has in hand: one attempt for each job, which of them run, and the slots that they run in.

A job leaves its slot when its answer is complete. Storing, publishing and acking that answer take milliseconds in
which the next job is begun already.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from decode_worker.stealing.models import LoadedModel
from infra.broker.envelope import Attempt
from kvstore.base import Run
from messages.jobs import DecodeJob, JobResult
from messages.kv import KVCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A KV cache in memory, and how long it took to come."""

    cache: KVCache
    seconds: float


@dataclass(eq=False)
class DecodeAttempt(Attempt[DecodeJob]):
    """One job on its way through a decode worker."""

    loaded: LoadedModel = field(init=False)  # the model that it is decoded with
    ahead: Future[Fetched | None] | None = None  # its KV cache, if that was fetched while another job had the slot
    began: float = 0.0  # monotonic clock
    queue_s: float = 0.0  # from submission to its slot
    rounded: bool = False  # its KV cache was computed with another rounding
    result: JobResult = field(init=False)
    body: bytes = b""  # the result as it is stored and sent; b"": there is none yet, and it needs its slot

    @property
    def key(self) -> Run:
        """What claims and results go by."""
        return self.job.job.job_id, self.job.job.run


class Attempts:
    """What runs now. A redelivery of something that runs is adopted by it instead of being decoded twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Run, DecodeAttempt] = {}
        self._models: Counter[str] = Counter()

    def start(self, attempt: DecodeAttempt) -> bool:
        """Whether it runs from now on; if its job runs already, that attempt has taken over the deliveries."""
        with self._lock:
            known = self._running.get(attempt.key)
            if known:
                known.deliveries.extend(attempt.deliveries)
                return False
            attempt.began = time.monotonic()
            self._running[attempt.key] = attempt
            self._models[attempt.job.job.model] += 1
            return True

    def end(self, attempt: DecodeAttempt) -> None:
        """Take it out. If it was settled, what was adopted since then is acked; if not, all of it is still to settle.

        Harmless for one that has ended: its job may have come back, and run in another attempt.
        """
        with self._lock:
            if self._running.get(attempt.key) is attempt:
                del self._running[attempt.key]
                self._models[attempt.job.job.model] -= 1
            late = list(attempt.deliveries) if attempt.settled else []
        for delivery in late:
            delivery.ack()

    def all(self) -> list[DecodeAttempt]:
        """A snapshot."""
        with self._lock:
            return list(self._running.values())

    def next_end_s(self, expected_s: Callable[[DecodeJob], float]) -> float:
        """Seconds until the next slot is expected to free; 0 if that is overdue, infinite if nothing runs.

        `expected_s`: how long a job is expected to take.
        """
        ends = [attempt.began + expected_s(attempt.job) for attempt in self.all() if not attempt.body]
        return max(0.0, min(ends) - time.monotonic()) if ends else math.inf

    def foreign(self, model: str) -> bool:
        """Whether a job of another model runs."""
        with self._lock:
            return any(count for other, count in self._models.items() if other != model)


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

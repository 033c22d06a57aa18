"""What a decode worker has in hand: one attempt for each job, and which of them run."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from decode_worker.stealing.models import LoadedModel
from infra.broker.envelope import Attempt
from kvstore.base import Run
from messages.jobs import DecodeJob, JobResult
from messages.kv import KVCache


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

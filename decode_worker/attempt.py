"""What a decode worker has in hand: one attempt for each job, and which of them run."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

from decode_worker.fetching import Fetched
from decode_worker.stealing.models import LoadedModel
from infra.broker.envelope import Attempt
from kvstore.base import Run
from messages.jobs import DecodeJob, JobResult


@dataclass(eq=False)
class DecodeAttempt(Attempt[DecodeJob]):
    """One job on its way through a decode worker."""

    loaded: LoadedModel = field(init=False)  # the model that it is decoded with
    ahead: Future[Fetched | None] | None = None  # its KV cache, if that was fetched while another job had the slot
    ends_at: float = math.inf  # when its slot is expected to free, monotonic clock; infinite: it is in none
    result: JobResult = field(init=False)
    body: bytes = b""  # the result as it is stored and sent; b"": there is none yet

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

    def start(self, attempt: DecodeAttempt, expected_s: float) -> bool:
        """Whether it runs from now on; if its job runs already, that attempt has taken over the deliveries."""
        with self._lock:
            known = self._running.get(attempt.key)
            if known:
                known.deliveries.extend(attempt.deliveries)
                return False
            attempt.ends_at = time.monotonic() + expected_s
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

    def next_end_s(self) -> float:
        """Seconds until the next job is expected to end; 0 if it is overdue, infinite if nothing runs."""
        ends = [attempt.ends_at for attempt in self.all()]
        return max(0.0, min(ends) - time.monotonic()) if ends else math.inf

    def foreign(self, model: str) -> bool:
        """Whether a job of another model runs."""
        with self._lock:
            return any(count for other, count in self._models.items() if other != model)

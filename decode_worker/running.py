"""The jobs a decode worker has in its slots."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from decode_worker.fetching import AheadFetch
from decode_worker.residency import Loaded
from infra.broker import Delivery
from messages.jobs import DecodeJob

Why = Literal["", "cancelled", "expired", "leaving"]


@dataclass(frozen=True, slots=True)
class Means:
    """What a job is decoded with: its model, and its KV cache if that was fetched ahead."""

    loaded: Loaded
    ahead: AheadFetch | None = None


@dataclass
class Running:
    """One job in a slot: the deliveries that end with it, how to stop it, and why it was stopped."""

    key: tuple[str, int]  # job_id, run
    batch_id: str
    model: str
    deadline: float
    held: list[Delivery]
    means: Means
    ends_at: float  # expected; monotonic clock
    stop: threading.Event = field(default_factory=threading.Event)
    why: Why = ""

    def answered(self) -> None:
        """Its answer is complete: what follows takes no slot."""
        self.ends_at = math.inf

    def end(self, why: Why) -> None:
        """Stop it; the first reason counts."""
        self.why = self.why or why
        self.stop.set()


class RunningJobs:
    """What runs now. A redelivery of something that runs is adopted by it instead of being decoded twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, int], Running] = {}
        self._models: Counter[str] = Counter()

    def start(self, job: DecodeJob, held: list[Delivery], means: Means, expected_s: float) -> Running | None:
        """A new entry, or None if the job runs already: its entry then holds these deliveries too."""
        key = (job.job.job_id, job.job.run)
        with self._lock:
            known = self._jobs.get(key)
            if known:
                known.held.extend(held)
                return None
            ends_at = time.monotonic() + expected_s
            running = Running(key, job.job.batch_id, job.job.model, job.job.deadline, held, means, ends_at)
            self._jobs[key] = running
            self._models[running.model] += 1
            return running

    def end(self, running: Running, settled: bool) -> None:
        """Take it out. If it was `settled`, what was adopted since then is acked; if not, all is left to the broker."""
        with self._lock:
            if self._jobs.pop(running.key, None):
                self._models[running.model] -= 1
            late = list(running.held) if settled else []
        for delivery in late:
            delivery.ack()

    def all(self) -> list[Running]:
        """A snapshot."""
        with self._lock:
            return list(self._jobs.values())

    def next_end_s(self) -> float:
        """Seconds until the next job is expected to end; 0 if it is overdue, infinite if nothing runs."""
        ends = [running.ends_at for running in self.all()]
        return max(0.0, min(ends) - time.monotonic()) if ends else math.inf

    def foreign(self, model: str) -> bool:
        """Whether a job of another model runs."""
        with self._lock:
            return any(count for other, count in self._models.items() if other != model)

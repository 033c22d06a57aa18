"""The jobs a decode worker has in its slots."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

from infra.broker import Delivery
from messages.jobs import DecodeJob

Why = Literal["", "cancelled", "expired", "leaving"]


@dataclass
class Running:
    """One job in a slot: the deliveries that end with it, how to stop it, and why it was stopped."""

    key: tuple[str, int]  # job_id, run
    batch_id: str
    deadline: float
    held: list[Delivery]
    stop: threading.Event = field(default_factory=threading.Event)
    why: Why = ""

    def end(self, why: Why) -> None:
        """Stop it; the first reason counts."""
        self.why = self.why or why
        self.stop.set()


class RunningJobs:
    """What runs now. A redelivery of something that runs is adopted by it instead of being decoded twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[str, int], Running] = {}

    def start(self, job: DecodeJob, held: list[Delivery]) -> Running | None:
        """A new entry, or None if the job runs already: its entry then holds these deliveries too."""
        key = (job.job.job_id, job.job.run)
        with self._lock:
            known = self._jobs.get(key)
            if known:
                known.held.extend(held)
                return None
            running = Running(key, job.job.batch_id, job.job.deadline, held)
            self._jobs[key] = running
            return running

    def end(self, running: Running, settled: bool) -> None:
        """Take it out. If it was `settled`, what was adopted since then is acked; if not, all is left to the broker."""
        with self._lock:
            self._jobs.pop(running.key, None)
            late = list(running.held) if settled else []
        for delivery in late:
            delivery.ack()

    def all(self) -> list[Running]:
        """A snapshot."""
        with self._lock:
            return list(self._jobs.values())

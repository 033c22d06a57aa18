"""The cluster state as workers see it: an answer even while the store is away.

Nothing on the cluster state decides whether a job is done; so a worker goes on with the harmless assumption (not
cancelled, no stored result, claim granted) rather than fail a job for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.base import TTL_S, ClusterState, Run
from messages.errors import StoreUnavailable
from messages.workers import WorkerInfo

log = logging.getLogger(__name__)
T = TypeVar("T")

# The store's clock is read that often and extrapolated in between: clocks drift by far less than a message takes.
_CLOCK_EVERY_S = 1.0
_BEYOND_BOUNDS = 1 << 30


class BestEffortClusterState(ClusterState):
    """A cluster state whose failures are logged once per outage and answered with the harmless assumption."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        self._is_away = False
        # Of the store's clock to our monotonic one, as last seen: our wall clock may be set while the store is away.
        self._offset_s = time.time() - time.monotonic()
        self._next_look = 0.0

    def now(self) -> float:
        """The store's clock, or what it must show by now; before it was first seen, our own."""
        if time.monotonic() >= self._next_look:
            now = self._try(self._cluster_state.now, 0.0)
            if now:
                self._offset_s = now - time.monotonic()
            self._next_look = time.monotonic() + _CLOCK_EVERY_S
        return time.monotonic() + self._offset_s

    def register(self, registration: WorkerInfo, ttl_s: float) -> None:
        """Publish or renew a registration, if possible."""
        self._try(lambda: self._cluster_state.register(registration, ttl_s), None)

    def encoded_registrations(self) -> dict[str, bytes]:
        """Registrations, or none."""
        return self._try(self._cluster_state.encoded_registrations, {})

    def unregister(self, worker_id: str) -> None:
        """Remove a registration, if possible; else it runs out."""
        self._try(lambda: self._cluster_state.unregister(worker_id), None)

    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """Stored results, or claims; no result and granted if nobody can say."""
        nobody_can_say: tuple[bytes | None, bool] = (None, True)
        return self._try(lambda: self._cluster_state.take_up(worker_id, runs, ttl_s), [nobody_can_say] * len(runs))

    def finish(self, worker_id: str, results: Sequence[tuple[str, int, bytes]], ttl_s: float = TTL_S) -> None:
        """Keep results, if possible; claims run out."""
        self._try(lambda: self._cluster_state.finish(worker_id, results, ttl_s), None)

    def note_answer(self, job_id: str, run: int, number: int, body: bytes, ttl_s: float = TTL_S) -> None:
        """Keep an answer, if possible."""
        self._try(lambda: self._cluster_state.note_answer(job_id, run, number, body, ttl_s), None)

    def noted_answers(self, job_id: str, run: int) -> dict[int, bytes]:
        """The answers kept, or none."""
        return self._try(lambda: self._cluster_state.noted_answers(job_id, run), {})

    def forget_answers(self, job_id: str, run: int) -> None:
        """Forget them, if possible; else they run out."""
        self._try(lambda: self._cluster_state.forget_answers(job_id, run), None)

    def cancel(self, batch_id: str, ttl_s: float = TTL_S) -> None:
        """Set a tombstone, if possible."""
        self._try(lambda: self._cluster_state.cancel(batch_id, ttl_s), None)

    def is_cancelled(self, batch_id: str) -> bool:
        """Whether there is a tombstone; False if nobody can say."""
        return self._try(lambda: self._cluster_state.is_cancelled(batch_id), False)

    def claim(self, job_id: str, run: int, worker_id: str, ttl_s: float) -> bool:
        """Claim; granted if nobody can say."""
        return self._try(lambda: self._cluster_state.claim(job_id, run, worker_id, ttl_s), True)

    def release(self, job_id: str, run: int, worker_id: str) -> None:
        """Release a claim, if possible; else it runs out."""
        self._try(lambda: self._cluster_state.release(job_id, run, worker_id), None)

    def count_crashes(self, stage: str, job_id: str, run: int, change: int, ttl_s: float = TTL_S) -> int:
        """Count; beyond all bounds if nobody can say: the broker's count decides then."""
        return self._try(lambda: self._cluster_state.count_crashes(stage, job_id, run, change, ttl_s), _BEYOND_BOUNDS)

    def put_sketch(self, name: str, body: bytes, ttl_s: float = TTL_S) -> None:
        """Keep or renew a sketch, if possible."""
        self._try(lambda: self._cluster_state.put_sketch(name, body, ttl_s), None)

    def get_sketch(self, name: str) -> bytes | None:
        """A sketch, if it is there and the store can say so."""
        return self._try(lambda: self._cluster_state.get_sketch(name), None)

    def reserve(self, name: str, size_bytes: int, capacity_bytes: int, ttl_s: float) -> bool:
        """Reserve; granted if nobody can say: putting will show."""
        return self._try(lambda: self._cluster_state.reserve(name, size_bytes, capacity_bytes, ttl_s), True)

    def unreserve(self, name: str) -> None:
        """Give a reservation up, if possible; else it runs out."""
        self._try(lambda: self._cluster_state.unreserve(name), None)

    def reserved_bytes(self) -> int:
        """Live reservations, or 0."""
        return self._try(self._cluster_state.reserved_bytes, 0)

    def close(self) -> None:
        """Close the cluster state underneath."""
        self._cluster_state.close()

    def _try(self, call: Callable[[], T], fallback: T) -> T:
        try:
            answer = call()
        except StoreUnavailable as error:
            if not self._is_away:
                log.warning("the store is away, going on without it: %s", error)
            self._is_away = True
            return fallback
        if self._is_away:
            log.info("the store is back")
        self._is_away = False
        return answer

"""The board as workers see it: an answer even while the store is away.

Nothing on the board decides whether a job is done; so a worker goes on with the harmless assumption (not cancelled,
no stored result, claim granted) rather than fail a job for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.base import TTL_S, Board, Run
from messages.cards import WorkerCard
from messages.errors import StoreUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

# The store's clock is read that often, and reckoned in between: two clocks part by far less than a message takes.
_CLOCK_EVERY_S = 1.0
_BEYOND_BOUNDS = 1 << 30


class BestEffortBoard(Board):
    """A board whose failures are logged once per outage and answered with the harmless assumption."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._away = False
        # Of the store's clock to our monotonic one, as last seen: our wall clock may be set while the store is away.
        self._offset_s = time.time() - time.monotonic()
        self._next_look = 0.0

    def now(self) -> float:
        """The store's clock, or what it must show by now; before it was first seen, our own."""
        if time.monotonic() >= self._next_look:
            now = self._try(self._board.now, 0.0)
            if now:
                self._offset_s = now - time.monotonic()
            self._next_look = time.monotonic() + _CLOCK_EVERY_S
        return time.monotonic() + self._offset_s

    def put_card(self, card: WorkerCard, ttl_s: float) -> None:
        """Publish or renew a card, if possible."""
        self._try(lambda: self._board.put_card(card, ttl_s), None)

    def cards(self) -> list[WorkerCard]:
        """Cards, or none."""
        return self._try(self._board.cards, [])

    def remove_card(self, worker_id: str) -> None:
        """Remove a card, if possible; else it runs out."""
        self._try(lambda: self._board.remove_card(worker_id), None)

    def put_result(self, job_id: str, run: int, body: bytes, ttl_s: float = TTL_S) -> None:
        """Keep a result, if possible."""
        self._try(lambda: self._board.put_result(job_id, run, body, ttl_s), None)

    def get_result(self, job_id: str, run: int) -> bytes | None:
        """A stored result, if there is one and the store can say so."""
        return self._try(lambda: self._board.get_result(job_id, run), None)

    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """Stored results, or claims; no result and granted if nobody can say."""
        nobody_can_say: tuple[bytes | None, bool] = (None, True)
        return self._try(lambda: self._board.take_up(worker_id, runs, ttl_s), [nobody_can_say] * len(runs))

    def finish(self, worker_id: str, results: Sequence[tuple[str, int, bytes]], ttl_s: float = TTL_S) -> None:
        """Keep results, if possible; claims run out."""
        self._try(lambda: self._board.finish(worker_id, results, ttl_s), None)

    def cancel(self, batch_id: str, ttl_s: float = TTL_S) -> None:
        """Set a tombstone, if possible."""
        self._try(lambda: self._board.cancel(batch_id, ttl_s), None)

    def is_cancelled(self, batch_id: str) -> bool:
        """Whether there is a tombstone; False if nobody can say."""
        return self._try(lambda: self._board.is_cancelled(batch_id), False)

    def claim(self, job_id: str, run: int, worker_id: str, ttl_s: float) -> bool:
        """Claim; granted if nobody can say."""
        return self._try(lambda: self._board.claim(job_id, run, worker_id, ttl_s), True)

    def release(self, job_id: str, run: int, worker_id: str) -> None:
        """Release a claim, if possible; else it runs out."""
        self._try(lambda: self._board.release(job_id, run, worker_id), None)

    def count_takes(self, stage: str, job_id: str, run: int, change: int, ttl_s: float = TTL_S) -> int:
        """Count; beyond all bounds if nobody can say: the broker's count decides then."""
        return self._try(lambda: self._board.count_takes(stage, job_id, run, change, ttl_s), _BEYOND_BOUNDS)

    def reserve(self, name: str, size_bytes: int, room_bytes: int, ttl_s: float) -> bool:
        """Reserve; granted if nobody can say: putting will show."""
        return self._try(lambda: self._board.reserve(name, size_bytes, room_bytes, ttl_s), True)

    def unreserve(self, name: str) -> None:
        """Give a reservation up, if possible; else it runs out."""
        self._try(lambda: self._board.unreserve(name), None)

    def reserved_bytes(self) -> int:
        """Live reservations, or 0."""
        return self._try(self._board.reserved_bytes, 0)

    def close(self) -> None:
        """Close the board underneath."""
        self._board.close()

    def _try(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            answer = call()
        except StoreUnavailable as error:
            if not self._away:
                log.warning("the store is away, going on without it: %s", error)
            self._away = True
            return otherwise
        if self._away:
            log.info("the store is back")
        self._away = False
        return answer

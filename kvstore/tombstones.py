"""Whether a batch was cancelled, without asking the store for every job.

A tombstone that is seen a second late wastes at most one job's work: the batch's owner writes `cancelled` for all of
its open jobs, and whoever cancels also tells the workers, who then look at once.
"""

from __future__ import annotations

import time

from kvstore.base import Board

_KNOWN_FOR_S = 1.0
_MOST = 1000  # batches remembered


class Tombstones:
    """One worker's view of the board's tombstones. Only "there is none" is remembered. Thread-safe."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._none_until: dict[str, float] = {}  # by batch; monotonic clock

    def has(self, batch_id: str) -> bool:
        """Whether the batch was cancelled, as of a second ago at most. Raises as the board does."""
        now = time.monotonic()
        if now < self._none_until.get(batch_id, 0.0):
            return False
        if self._board.is_cancelled(batch_id):
            return True
        if len(self._none_until) >= _MOST:
            self._none_until.clear()
        self._none_until[batch_id] = now + _KNOWN_FOR_S
        return False

    def heard(self, batch_id: str) -> None:
        """Somebody says that the batch was cancelled: look at the next job."""
        self._none_until.pop(batch_id, None)

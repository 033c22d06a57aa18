"""One worker computes a class's prefix while the others wait for it.

A lease (a claim on the store's board) says who computes. Waiting ends when the prefix is there, when the lease is
free, or after about the time that computing would have taken: a lease is a courtesy and never holds a job up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.base import Board
from kvstore.heartbeat import CLAIM_TTL_S
from messages.errors import Cancelled

_LOOK_EVERY_S = 0.1


class PrefixLeases:
    """The leases of one worker, whose heartbeat calls `renew`."""

    def __init__(self, board: Board, worker_id: str) -> None:
        self._board = board
        self._worker_id = worker_id
        self._held: list[tuple[str, int]] = []

    def held(self) -> list[tuple[str, int]]:
        """Claims that are ours."""
        return list(self._held)

    def renew(self) -> None:
        """Keep what is held."""
        for name in self.held():
            self._board.claim(*name, self._worker_id, CLAIM_TTL_S)

    @contextmanager
    def turn(
        self, chain: str, is_there: Callable[[], bool], patience_s: float, stop: threading.Event
    ) -> Iterator[bool]:
        """Whether it is for us to compute the prefix whose last block has this chain hash; False: it is there.

        Waits at most `patience_s` for another worker that computes it, then both do. Raises Cancelled if `stop` is set
        meanwhile, and what `is_there` raises.
        """
        name = (f"prefix-{chain}", 1)
        ours = self._wait(name, is_there, patience_s, stop)
        if ours:
            self._held.append(name)
        try:
            # Whoever held the lease until just now may have finished.
            yield not is_there()
        finally:
            if ours:
                self._held.remove(name)
                self._board.release(*name, self._worker_id)

    def _wait(
        self, name: tuple[str, int], is_there: Callable[[], bool], patience_s: float, stop: threading.Event
    ) -> bool:
        """Whether we hold the lease: if not, the prefix is there or our patience is at its end."""
        give_up = time.monotonic() + patience_s
        while not self._board.claim(*name, self._worker_id, CLAIM_TTL_S):
            if is_there() or time.monotonic() > give_up:
                return False
            if stop.wait(_LOOK_EVERY_S):
                raise Cancelled("cancelled while another worker computed the shared prefix")
        return True

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

_LOOK_EVERY_S = 0.05


class PrefixLeases:
    """The leases of one worker. Its heartbeat renews what `held` lists."""

    def __init__(self, board: Board, worker_id: str) -> None:
        self._board = board
        self._worker_id = worker_id
        self._held: list[tuple[str, int]] = []

    def held(self) -> list[tuple[str, int]]:
        """Claims to renew."""
        return list(self._held)

    @contextmanager
    def turn(
        self, chain: str, is_there: Callable[[], bool], patience_s: float, stop: threading.Event
    ) -> Iterator[bool]:
        """Whether it is for us to compute the prefix whose last block has this chain hash; False: it is there.

        Waits at most `patience_s` for another worker that computes it. Raises Cancelled if `stop` is set meanwhile.
        """
        name = (f"prefix-{chain}", 1)
        give_up = time.monotonic() + patience_s
        while not self._board.claim(*name, self._worker_id, CLAIM_TTL_S):
            if is_there():
                yield False
                return
            if time.monotonic() > give_up:
                yield True
                return
            if stop.wait(_LOOK_EVERY_S):
                raise Cancelled("cancelled while another worker computed the shared prefix")
        self._held.append(name)
        try:
            # Whoever held the lease until just now may have finished.
            yield not is_there()
        finally:
            self._held.remove(name)
            self._board.release(*name, self._worker_id)

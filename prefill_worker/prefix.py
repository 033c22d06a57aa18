"""One worker computes a class's prefix while the others wait for it, and so do its own other jobs.

A lease (a claim on the store's cluster state) says who computes. Waiting ends when the prefix is there, when the lease
is free, or after about the time that computing would have taken: a lease is a courtesy and never holds a job up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.base import ClusterState
from kvstore.heartbeat import CLAIM_TTL_S
from messages.errors import Cancelled

_LOOK_EVERY_S = 0.1


class PrefixLeases:
    """The leases of one worker, whose heartbeat calls `renew`. Thread-safe."""

    def __init__(self, cluster_state: ClusterState, worker_id: str) -> None:
        self._cluster_state = cluster_state
        self._worker_id = worker_id
        self._held: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def held(self) -> list[tuple[str, int]]:
        """Claims that are ours."""
        return list(self._held)

    def renew(self) -> None:
        """Keep what is held."""
        for name in self.held():
            self._cluster_state.claim(*name, self._worker_id, CLAIM_TTL_S)

    @contextmanager
    def turn(
        self, chain: str, is_there: Callable[[], bool], patience_s: float, stop: threading.Event
    ) -> Iterator[bool]:
        """Whether it is for us to compute the prefix whose last block has this chain hash; False: it is there.

        Waits at most `patience_s` for another worker, or job, that computes it, then both do. Raises Cancelled if
        `stop` is set meanwhile, and what `is_there` raises.
        """
        name = (f"prefix-{chain}", 1)
        give_up = time.monotonic() + patience_s
        while not (ours := self._claimed(name)):
            if is_there() or time.monotonic() > give_up:
                break
            if stop.wait(_LOOK_EVERY_S):
                raise Cancelled("cancelled while another worker computed the prefix")
        try:
            # Whoever held the lease until just now may have finished.
            yield not is_there()
        finally:
            if ours:
                self._held.remove(name)
                self._cluster_state.release(*name, self._worker_id)

    def _claimed(self, name: tuple[str, int]) -> bool:
        """Whether this job has it now. The store tells workers apart, and not the jobs of one."""
        with self._lock:
            ours = name not in self._held and self._cluster_state.claim(*name, self._worker_id, CLAIM_TTL_S)
            if ours:
                self._held.append(name)
            return ours

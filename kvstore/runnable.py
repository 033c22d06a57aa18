"""What the cluster state knows that speaks against running a job: its batch's tombstone, and how many workers crashed
with it.

`infra.checks` uses this to decide.

A tombstone that is noticed a second late wastes at most one job's work. The batch's owner writes `cancelled` for all of
its open jobs, and `cancel` also tells the workers, which then look at once. So not every job needs to ask the store.

Crash counts find poison messages. The broker's own count of returns would not do: it also counts lost connections, and
counts them for every job that a worker held but had not begun. Five connection resets in a row would make an innocent
job poison. So a worker adds one to the count in the cluster state when it begins a job that was returned, and subtracts
one when it is through with it, however that ends. What remains is the number of deliveries whose worker died. (First
deliveries are not counted, so that most jobs cost nothing. If the job is returned, its first delivery counts as a
crash.)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kvstore.base import ClusterState

_KNOWN_FOR_S = 1.0
_MAX_BATCHES = 1000  # how many batches are remembered


class Tombstones:
    """One worker's view of the cluster state's tombstones. Only the absence of a tombstone is remembered.
    Thread-safe."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        self._none_until: dict[str, float] = {}  # by batch; monotonic clock

    def has(self, batch_id: str) -> bool:
        """Whether the batch was cancelled, at most a second out of date. Raises the cluster state's errors."""
        now = time.monotonic()
        if now < self._none_until.get(batch_id, 0.0):
            return False
        if self._cluster_state.is_cancelled(batch_id):
            return True
        if len(self._none_until) >= _MAX_BATCHES:
            self._none_until.clear()
        self._none_until[batch_id] = now + _KNOWN_FOR_S
        return False

    def note_cancel(self, batch_id: str) -> None:
        """Note that the batch may have been cancelled, so that its next job asks the store again."""
        self._none_until.pop(batch_id, None)


@contextmanager
def counting_crashes(cluster_state: ClusterState, stage: str, job_id: str, run: int, returns: int) -> Iterator[int]:
    """A context for working on a job that was returned `returns` times. Yields how many workers crashed with it, at
    most."""
    if not returns:
        yield 0
        return
    earlier = cluster_state.count_crashes(stage, job_id, run, 1) - 1
    through = partial(cluster_state.count_crashes, stage, job_id, run, -1)
    try:
        yield min(returns, earlier + 1)
    except Exception:  # an Exception is a normal end; any other BaseException ends the worker
        through()
        raise
    through()

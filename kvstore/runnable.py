"""What the cluster state knows against running a job: its batch's tombstone, and how many workers crashed with it.

`infra.checks` makes the decision.

If a tombstone is seen a second late, at most one job's work is wasted: the batch's owner writes `cancelled` for all of
its open jobs, and cancelling also notifies the workers, which then check at once. So not every job asks the store for
its batch's tombstone.

Poison is recognised by the crash count. The broker's count doesn't work for that: it counts every return, also after a
lost connection, for all jobs that a worker held but had not begun. Five lost connections in a row would make an
innocent job poison. So a worker adds one to the count in the cluster state when it begins a job that has come back, and
subtracts one when the job ends in any way. What remains is the number of deliveries whose worker died. (First
deliveries are not counted, so that most jobs cost nothing. If the job came back, its first delivery counts as a crash.)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kvstore.base import ClusterState

_KNOWN_FOR_S = 1.0
_MAX_BATCHES = 1000  # the maximum number of batches that are remembered


class Tombstones:
    """One worker's view of the tombstones. Only that a batch has none is remembered. Thread-safe."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        # batch id -> monotonic time until which the batch counts as not cancelled
        self._none_until: dict[str, float] = {}

    def has(self, batch_id: str) -> bool:
        """Whether the batch was cancelled, as known at most a second ago. Raises as the cluster state does."""
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
        """Note that the batch may have been cancelled, so that the store is asked again for its next job."""
        self._none_until.pop(batch_id, None)


@contextmanager
def counting_crashes(cluster_state: ClusterState, stage: str, job_id: str, run: int, returns: int) -> Iterator[int]:
    """Count a crash if the worker dies within the block, for a job that came back `returns` times.

    Yields how many workers crashed with the job before, at most.
    """
    if not returns:
        yield 0
        return
    earlier = cluster_state.count_crashes(stage, job_id, run, 1) - 1
    through = partial(cluster_state.count_crashes, stage, job_id, run, -1)
    try:
        yield min(returns, earlier + 1)
    except Exception:  # an Exception ends only the job; any other BaseException ends the worker
        through()
        raise
    through()

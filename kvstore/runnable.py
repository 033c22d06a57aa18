"""What the cluster state knows against running a job: its batch's tombstone, and how many workers crashed with it.

`infra.checks` decides by it.

A tombstone that is seen a second late wastes at most one job's work: the batch's owner writes `cancelled` for all of
its open jobs, and whoever cancels also tells the workers, who then look at once. So no job asks the store for it.

Poison messages are found by the count of crashes. The broker counts every return, a lost connection's too, and with it
all jobs that a worker held but had not begun: five resets in a row would make poison of an innocent job. So a worker
counts one up in the cluster state when it begins a job that has come back, and one down when it is through with it,
however that ends. What stays is the number of deliveries whose worker died. (A first delivery is not counted, so that
jobs pay nothing for this: it counts as a crash if the job came back.)
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kvstore.base import ClusterState

_KNOWN_FOR_S = 1.0
_MAX_BATCHES = 1000  # batches remembered


class Tombstones:
    """One worker's view of the cluster state's tombstones. Only "there is none" is remembered. Thread-safe."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        self._none_until: dict[str, float] = {}  # by batch; monotonic clock

    def has(self, batch_id: str) -> bool:
        """Whether the batch was cancelled, as of a second ago at most. Raises as the cluster state does."""
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
        """Somebody says that the batch was cancelled: ask the store again for its next job."""
        self._none_until.pop(batch_id, None)


@contextmanager
def counting_crashes(cluster_state: ClusterState, stage: str, job_id: str, run: int, returns: int) -> Iterator[int]:
    """While a job that came back `returns` times is worked on; yields how many workers crashed with it, at most."""
    if not returns:
        yield 0
        return
    earlier = cluster_state.count_crashes(stage, job_id, run, 1) - 1
    through = partial(cluster_state.count_crashes, stage, job_id, run, -1)
    try:
        yield min(returns, earlier + 1)
    except Exception:  # an end like another; what is no Exception ends the worker
        through()
        raise
    through()

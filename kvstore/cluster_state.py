"""The cluster state for workers, which answers even while the store is away.

Nothing in the cluster state decides whether a job is done. So a worker continues with the harmless assumption (not
cancelled, no stored result, claim granted) instead of failing a job.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from kvstore.base import ClusterState, Run
from messages.errors import StoreUnavailable

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# The store's clock is read once per interval of this length, and is extrapolated in between. Until the next reading,
# the store's clock and ours drift apart by much less time than a message takes.
_CLOCK_EVERY_S = 1.0
_BEYOND_BOUNDS = 1 << 30


def _best_effort(
    method: Callable[Concatenate[ClusterState, P], T], assumption: T
) -> "Callable[Concatenate[BestEffortClusterState, P], T]":
    """Return a method that returns the answer of the cluster state underneath, or `assumption` if the store is away."""

    def call(self: "BestEffortClusterState", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._try(lambda: getattr(self._cluster_state, method.__name__)(*args, **kwargs), assumption)

    return call


class BestEffortClusterState(ClusterState):
    """A cluster state that answers with the harmless assumption if the store fails. Each outage is logged once."""

    def __init__(self, cluster_state: ClusterState) -> None:
        self._cluster_state = cluster_state
        self._is_away = False
        self.answers = True  # whether the store answered when it was last asked for the time

        # The store's clock minus our monotonic clock, as last measured. Our wall clock is not used, because somebody
        # can set it while the store is unavailable.
        self._offset_s = time.time() - time.monotonic()
        self._next_look = 0.0

    def now(self) -> float:
        """Return the store's clock, extrapolated while the store is away.

        Before it was first read, return our own clock.
        """
        if time.monotonic() >= self._next_look:
            now = self._try(self._cluster_state.now, 0.0)
            self.answers = bool(now)
            if now:
                self._offset_s = now - time.monotonic()
            self._next_look = time.monotonic() + _CLOCK_EVERY_S
        return time.monotonic() + self._offset_s

    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """Return stored results or claims. While the store is away, return no results and granted claims."""
        nobody_can_say: tuple[bytes | None, bool] = (None, True)
        return self._try(lambda: self._cluster_state.take_up(worker_id, runs, ttl_s), [nobody_can_say] * len(runs))

    # While the store is unavailable, these calls change nothing, and entries expire on their own.
    register = _best_effort(ClusterState.register, None)
    unregister = _best_effort(ClusterState.unregister, None)
    finish = _best_effort(ClusterState.finish, None)
    note_answer = _best_effort(ClusterState.note_answer, None)
    forget_answers = _best_effort(ClusterState.forget_answers, None)
    cancel = _best_effort(ClusterState.cancel, None)
    release = _best_effort(ClusterState.release, None)
    put_sketch = _best_effort(ClusterState.put_sketch, None)
    unreserve = _best_effort(ClusterState.unreserve, None)
    encoded_registrations = _best_effort(ClusterState.encoded_registrations, {})
    lost_registrations = _best_effort(ClusterState.lost_registrations, [])
    noted_answers = _best_effort(ClusterState.noted_answers, {})
    is_cancelled = _best_effort(ClusterState.is_cancelled, False)
    claim = _best_effort(ClusterState.claim, True)
    # While the store can't count crashes, the broker's count of returns decides.
    count_crashes = _best_effort(ClusterState.count_crashes, _BEYOND_BOUNDS)
    get_sketch = _best_effort(ClusterState.get_sketch, None)
    reserve = _best_effort(ClusterState.reserve, True)  # a full store refuses the records when they are written
    reserved_bytes = _best_effort(ClusterState.reserved_bytes, 0)

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

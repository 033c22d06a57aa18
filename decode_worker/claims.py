"""Claims on jobs, in the cluster state. A dead worker doesn't renew its claims, so they expire."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infra.broker.base import Delivery
from infra.broker.envelope import run_of
from kvstore.base import ClusterState, Run
from kvstore.heartbeat import CLAIM_TTL_S

# The stored result, or None; and whether this worker has the claim.
_Standing = tuple[bytes | None, bool]


class Claims:
    """The claims of one decode worker. Thread-safe."""

    def __init__(self, cluster_state: ClusterState, worker_id: str) -> None:
        self._cluster_state = cluster_state
        self._worker_id = worker_id
        self._looked_up: dict[Run, _Standing] = {}

    def take_up(self, key: Run) -> _Standing:
        """Return the job's result, if it has one, and whether the job is ours."""
        return self._looked_up.pop(key, None) or self.renew([key])[0]

    def renew(self, keys: Sequence[Run]) -> list[_Standing]:
        """Renew these claims in one round trip. Jobs that have their results need no claim any more."""
        return self._cluster_state.take_up(self._worker_id, keys, CLAIM_TTL_S)

    def release(self, key: Run) -> None:
        """Give up a claim, so that other workers can take the job."""
        self._cluster_state.release(*key, self._worker_id)

    @contextmanager
    def looked_up(self, deliveries: list[Delivery]) -> Iterator[None]:
        """Claim the jobs of these deliveries, which are handled within the block.

        Unused claims are released at its end.
        """
        keys = [run_of(delivery) for delivery in deliveries]
        self._looked_up |= zip(keys, self.renew(keys), strict=True)
        try:
            yield
        finally:
            for key in keys:
                if self._looked_up.pop(key, None):
                    self.release(key)

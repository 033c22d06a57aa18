"""Which jobs are ours: a claim on each, in the cluster state, which a worker that died renews no more."""

from __future__ import annotations

from collections.abc import Sequence

from infra.broker.base import Delivery
from infra.broker.envelope import open_envelope
from infra.broker.topology import stage_and_model
from kvstore.base import ClusterState, Run
from kvstore.heartbeat import CLAIM_TTL_S

# A result that is stored already, and whether the claim is ours.
_Standing = tuple[bytes | None, bool]


class Claims:
    """The claims of one decode worker. Thread-safe."""

    def __init__(self, cluster_state: ClusterState, worker_id: str) -> None:
        self._cluster_state = cluster_state
        self._worker_id = worker_id
        self._looked_up: dict[Run, _Standing] = {}

    def take_up(self, key: Run) -> _Standing:
        """The job's result, if it has one, and whether the job is ours."""
        return self._looked_up.pop(key, None) or self.renew([key])[0]

    def renew(self, keys: Sequence[Run]) -> list[_Standing]:
        """All in one round trip; those that have their results need no claim any more."""
        return self._cluster_state.take_up(self._worker_id, keys, CLAIM_TTL_S)

    def release(self, key: Run) -> None:
        """Let others have it."""
        self._cluster_state.release(*key, self._worker_id)

    def look_up(self, deliveries: list[Delivery]) -> None:
        """Take up the jobs of several deliveries, which are about to be handled."""
        keys = [_key(delivery) for delivery in deliveries]
        self._looked_up |= zip(keys, self.renew(keys), strict=True)

    def forget(self, deliveries: list[Delivery]) -> None:
        """These are handled no more: release those that nobody has taken up after all."""
        for delivery in deliveries:
            if self._looked_up.pop(_key(delivery), None):
                self.release(_key(delivery))


def _key(delivery: Delivery) -> Run:
    envelope = open_envelope(delivery, *stage_and_model(delivery.queue))
    return envelope.job_id, envelope.run

"""The cluster state as workers see it while the store is away."""

import time

import pytest

from kvstore.cluster_state import BestEffortClusterState
from kvstore.memory import MemoryClusterState
from messages.errors import StoreUnavailable


class ClusterState(MemoryClusterState):
    """A cluster state of a machine whose clock is 100 s ahead, and which can be away."""

    away = False

    def now(self) -> float:
        if self.away:
            raise StoreUnavailable("away")
        return time.time() + 100


def test_while_the_store_is_away_setting_our_clock_changes_no_deadline(monkeypatch: pytest.MonkeyPatch):
    # Given a store's clock that was seen once
    store = ClusterState()
    cluster_state = BestEffortClusterState(store)
    seen = cluster_state.now()

    # When the store goes away and somebody sets our clock an hour ahead
    store.away = True
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)

    # Then the cluster state's time goes on from what was seen
    assert seen <= cluster_state.now() < seen + 60


def test_before_the_store_was_seen_our_own_clock_serves():
    store = ClusterState()
    store.away = True
    assert abs(BestEffortClusterState(store).now() - time.time()) < 60

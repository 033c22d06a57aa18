"""What is known against running a job: its batch was cancelled, or it took its worker along."""

import pytest

from kvstore.base import ClusterState
from kvstore.cluster_state import BestEffortClusterState
from kvstore.memory import MemoryClusterState
from kvstore.runnable import Tombstones, counting_crashes
from messages.errors import StoreUnavailable

# Tombstones


class Counting(MemoryClusterState):
    """Counts the questions."""

    asked = 0

    def is_cancelled(self, batch_id: str) -> bool:
        self.asked += 1
        return super().is_cancelled(batch_id)


def test_the_cluster_state_is_asked_once_for_many_jobs_of_a_batch():
    cluster_state = Counting()
    tombstones = Tombstones(cluster_state)

    assert not any(tombstones.has("batch") for _ in range(100))

    assert cluster_state.asked < 10


def test_who_hears_of_a_cancelled_batch_sees_its_tombstone_at_once():
    cluster_state = Counting()
    tombstones = Tombstones(cluster_state)
    assert not tombstones.has("batch")

    cluster_state.cancel("batch")
    tombstones.note_cancel("batch")

    assert tombstones.has("batch")


def test_a_tombstone_that_was_taken_away_is_not_remembered():
    cluster_state = MemoryClusterState()
    tombstones = Tombstones(cluster_state)
    cluster_state.cancel("batch")
    assert tombstones.has("batch")

    cluster_state.cancel("batch", ttl_s=0)

    assert not tombstones.has("batch")


# Crashes


class Fell(BaseException):
    """The worker is gone."""


def fall(cluster_state: ClusterState, returns: int) -> int:
    """A worker takes the job and crashes with it; returns how many crashed with it before, as the worker was told."""
    take = counting_crashes(cluster_state, "decode", "job", 1, returns)
    crashes = take.__enter__()
    take.__exit__(Fell, Fell(), None)
    return crashes


def test_crashes_are_counted_from_the_first_on() -> None:
    cluster_state = MemoryClusterState()
    assert [fall(cluster_state, returns) for returns in range(6)] == [0, 1, 2, 3, 4, 5]


def test_a_take_that_ended_is_no_fall_however_it_ended() -> None:
    cluster_state = MemoryClusterState()
    for returns in range(1, 9):
        with counting_crashes(cluster_state, "decode", "job", 1, returns) as crashes:
            assert crashes == 1, "nobody noted the first take, which may have been one"
        with pytest.raises(ValueError, match="an end"), counting_crashes(cluster_state, "decode", "job", 1, returns):
            raise ValueError("an end")


def test_each_run_and_stage_counts_by_itself() -> None:
    cluster_state = MemoryClusterState()
    fall(cluster_state, 1)
    for stage, run in (("prefill", 1), ("decode", 2)):
        with counting_crashes(cluster_state, stage, "job", run, 5) as crashes:
            assert crashes == 1


def test_without_the_store_the_brokers_count_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_arguments: object) -> int:
        raise StoreUnavailable("away")

    cluster_state = MemoryClusterState()
    monkeypatch.setattr(cluster_state, "count_crashes", away)
    with counting_crashes(BestEffortClusterState(cluster_state), "decode", "job", 1, 4) as crashes:
        assert crashes == 4

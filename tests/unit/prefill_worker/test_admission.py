"""Admission: what may be stored, who waits for room, and the ways out of a full store."""

import pytest

from kvstore.base import StoreUsage
from kvstore.memory import MemoryClusterState, MemoryKVStore
from messages.errors import StoreUnavailable
from prefill_worker.admission import RENEW_EVERY_S, Admission, NoCapacity, high_water_mark
from tests.support.kv_samples import FINGERPRINT, layout, raised_by, records_of, refs_of
from tests.support.waiting import wait_until

LAYOUT = layout()
BLOCK_TOKENS = 32
MAX_BYTES = 1_000_000
MARK = 850_000


class Store(MemoryKVStore):
    """A store in memory, filled as a test wants it; `away` makes it unreachable."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_bytes)
        self.away = False

    def usage(self) -> StoreUsage:
        if self.away:
            raise StoreUnavailable("unplugged by the test")
        return super().usage()

    def fill(self, size_bytes: int, shared: bool, seed: str = "") -> None:
        """Add at least this many bytes, of shared blocks or of one job's own."""
        before, count = self.usage().used_bytes, 4096
        refs = refs_of(LAYOUT, count, count if shared else 0, FINGERPRINT + seed)
        for record in records_of(LAYOUT, refs):
            if self.usage().used_bytes - before >= size_bytes:
                return
            self.put(FINGERPRINT, LAYOUT, [record])
        raise AssertionError(f"{size_bytes:,} bytes are more than {count} tokens")


class Door:
    """An admission whose clock stands still until a test moves it."""

    def __init__(self, store: Store, cluster_state: MemoryClusterState | None = None, name: str = "worker-1") -> None:
        self.now = 1000.0
        self.decode_waits = False
        self.cluster_state = cluster_state or MemoryClusterState()
        self.admission = Admission(store, self.cluster_state, name, lambda: self.decode_waits, lambda: self.now)

    def refuses(self, size: int) -> bool:
        """Whether a job of this size is told that there is no room."""
        return bool(raised_by(lambda: self._reserve(size), NoCapacity))

    def grants(self, size: int) -> bool:
        """Whether a job of this size gets its room."""
        return not self.refuses(size)

    def opens_within(self, seconds: float) -> bool:
        """Let time pass, a look every quarter of a second as a worker does, until the door opens."""
        for _ in range(int(seconds * 4)):
            if self.admission.is_open():
                return True
            self.now += 0.25
        return False

    def _reserve(self, size: int) -> None:
        with self.admission.reserve(lambda: size):
            pass


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_reservation_is_seen_on_the_cluster_state_while_the_job_runs(store: Store) -> None:
    door = Door(store)
    with door.admission.reserve(lambda: 5000):
        assert door.cluster_state.reserved_bytes() == 5000
    assert door.cluster_state.reserved_bytes() == 0


def test_jobs_fit_up_to_the_high_water_mark_and_not_beyond(store: Store) -> None:
    store.fill(400_000, shared=False)
    room = high_water_mark(store.usage()) - store.usage().used_bytes

    assert high_water_mark(store.usage()) == MARK
    assert Door(store).grants(room)
    assert Door(store).refuses(room + 1)


def test_two_workers_together_get_no_more_than_there_is(store: Store) -> None:
    # Given two workers, one of which holds half of the store and a bit
    first = Door(store)
    second = Door(store, first.cluster_state, "worker-2")

    with first.admission.reserve(lambda: MARK // 2 + 1):
        # Then the other one gets no half, although nothing is stored yet
        assert second.refuses(MARK // 2)

    # and gets it as soon as the first is done
    assert second.opens_within(1)
    assert second.grants(MARK // 2)


def test_what_a_job_has_stored_is_not_counted_twice(store: Store) -> None:
    # Given a job whose first half is stored while its second is computed
    door, left = Door(store), [100_000]
    with door.admission.reserve(lambda: left[0]):
        left[0] = 50_000

        # Then its reservation follows, and stays until it is left
        wait_until(lambda: door.cluster_state.reserved_bytes() == 50_000, "the reservation shrinks", 5 * RENEW_EVERY_S)
    assert door.cluster_state.reserved_bytes() == 0


def test_a_job_that_stores_nothing_new_needs_no_room(store: Store) -> None:
    store.fill(900_000, shared=False)
    assert Door(store).grants(0)


def test_a_store_without_limit_takes_everything() -> None:
    store = Store(max_bytes=0)
    door = Door(store)
    with door.admission.reserve(lambda: 1 << 50):
        assert door.cluster_state.reserved_bytes() == 0


def test_little_is_not_reserved_while_the_store_is_far_from_full(store: Store) -> None:
    door = Door(store)
    with door.admission.reserve(lambda: MARK // 1024):
        assert door.cluster_state.reserved_bytes() == 0
    with door.admission.reserve(lambda: MARK // 1024 + 1):
        assert door.cluster_state.reserved_bytes() == MARK // 1024 + 1

    store.fill(MARK // 4, shared=False)
    later = Door(store)
    with later.admission.reserve(lambda: MARK // 1024):
        assert later.cluster_state.reserved_bytes() == MARK // 1024


def test_a_job_bigger_than_the_whole_budget_is_told_so_and_shuts_no_door(store: Store) -> None:
    door = Door(store)
    with pytest.raises(StoreUnavailable, match="850,001 bytes, but all KV caches together are allowed only 850,000"):
        door.admission.reserve(lambda: MARK + 1)
    assert door.admission.is_open()


def test_while_decode_waits_the_door_stays_shut_and_nothing_is_freed(store: Store) -> None:
    # Given a store full of shared blocks, and jobs that wait for decode and will use them
    store.fill(840_000, shared=True)
    used = store.usage().used_bytes
    door = Door(store)
    door.decode_waits = True

    # When a job finds no room
    assert door.refuses(100_000)

    # Then prefill waits, for as long as it takes
    assert not door.opens_within(3600)
    assert store.usage().used_bytes == used


def test_with_nothing_in_decode_the_least_recently_used_shared_blocks_go(store: Store) -> None:
    # Given a store full of shared blocks, and of a few that are a job's own
    store.fill(100_000, shared=False)
    store.fill(740_000, shared=True)
    door = Door(store)

    # When a job finds no room
    assert door.refuses(200_000)

    # Then room is made for it, and not much more
    assert door.opens_within(3)
    assert door.grants(200_000)
    assert 500_000 < store.usage().used_bytes < 650_000


def test_one_look_that_finds_decode_idle_throws_no_prefix_away(store: Store) -> None:
    # Given a full store, and a depth that is read as zero now and then
    store.fill(840_000, shared=True)
    used = store.usage().used_bytes
    door = Door(store)
    assert door.refuses(100_000)

    for _ in range(20):
        door.decode_waits = not door.decode_waits
        assert not door.admission.is_open()
        door.now += 0.5
    assert store.usage().used_bytes == used


def test_the_door_opens_when_decode_has_freed_enough(store: Store) -> None:
    store.fill(840_000, shared=False)
    door = Door(store)
    door.decode_waits = True
    assert door.refuses(100_000)
    assert not door.opens_within(5)

    store.delete(refs_of(LAYOUT, 4096))

    assert door.opens_within(1)
    assert door.grants(100_000)


def test_the_store_is_asked_at_most_twice_a_second(store: Store) -> None:
    store.fill(840_000, shared=False)
    door = Door(store)
    assert door.refuses(100_000)
    assert not door.admission.is_open()
    store.delete(refs_of(LAYOUT, 4096))

    door.now += 0.4
    assert not door.admission.is_open()
    door.now += 0.2
    assert door.admission.is_open()


def test_where_nothing_frees_the_store_jobs_go_on_without_after_a_while(store: Store) -> None:
    # Given a store full of blocks whose owners never come, and nothing in decode
    store.fill(840_000, shared=False)
    door = Door(store)
    assert door.refuses(100_000)

    # When the door has been shut for a while
    assert not door.opens_within(9)
    assert door.opens_within(3)

    # Then this job and the next go on at once
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="no room for 100,000 bytes"):
            door.admission.reserve(lambda: 100_000)
        assert door.admission.is_open()

    # but not ahead of what they left to decode
    door.decode_waits = True
    assert door.refuses(100_000)


def test_a_store_that_was_given_up_is_tried_again_later(store: Store) -> None:
    # Given a full store that was given up
    store.fill(840_000, shared=False)
    door = Door(store)
    assert door.refuses(100_000)
    assert door.opens_within(12)

    # When shared blocks lie there half a minute later
    store.delete(refs_of(LAYOUT, 4096))
    store.fill(840_000, shared=True)
    door.now += 31

    # Then they make room
    assert door.refuses(100_000)
    assert door.opens_within(3)
    assert door.grants(100_000)


def test_a_store_that_goes_away_opens_the_door(store: Store) -> None:
    # Given a door that is shut
    store.fill(840_000, shared=False)
    door = Door(store)
    assert door.refuses(100_000)

    # When the store is away
    store.away = True

    # Then jobs come in, and find out
    assert door.opens_within(1)
    with pytest.raises(StoreUnavailable, match="unplugged"):
        door.admission.reserve(lambda: 100_000)

"""Admission: whether the store has room for the KV cache of one more prompt.

Prefill takes no job while there is no room, and reserves what a job needs before the job starts. So two prefills never
fill the store with half a cache each. Decode never waits for any of this. While jobs wait for decode, prefill waits
too, since each of those jobs will free its blocks. If none waits there, the least recently used shared blocks are
evicted. If that doesn't make enough room either, jobs go on without their KV cache.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import NoReturn

from kvstore.base import ClusterState, KVStore, StoreUsage
from messages.errors import Stopped, StoreUnavailable

log = logging.getLogger(__name__)

Clock = Callable[[], float]  # returns a time in seconds, which never decreases

# The share of the store's maximum that KV caches are allowed to take. The rest is for results, registrations and
# unforeseen records.
HIGH_WATER = 0.85
# The reservation of a dead worker expires after this time.
RESERVATION_TTL_S = 10.0
RENEW_EVERY_S = 1.0
_NO_LIMIT = 1 << 62
_LOOK_EVERY_S = 0.5
# If the store was far from full when its size was last read, the size is not read again for this many seconds.
_KNOWN_FOR_S = 1.0
# A shared prefix is evicted only if checks have found no waiting job throughout this time. One check is not enough,
# because the broker can wrongly report that no job waits.
_IDLE_FOR_SURE_S = 1.0
# If the store stays full for this many seconds while no job waits for decode, it will not become emptier soon.
_PATIENCE_S = 10.0
_HOPELESS_FOR_S = 30.0
# A job that needs at most this share of the high-water mark makes no reservation while the store is far from full,
# because a reservation costs two round trips and a thread, more than the rest of a short prompt's prefill. Even a
# hundred jobs without a reservation take only a tenth of the mark.
_NEGLIGIBLE = 1 / 1024
# Eviction frees this share of the high-water mark in addition to what one job needs. Otherwise every further job would
# wait for another eviction.
_SPARE = 1 / 16


class NoCapacity(Stopped):
    """The store has no room for this job now. Nothing was done, and admission is closed until there may be room."""


def high_water_mark(usage: StoreUsage) -> int:
    """Return the bytes up to which prefill fills the store; 0: it has no limit."""
    return int(usage.max_bytes * HIGH_WATER)


class Admission:
    """Decides for one prefill worker whether jobs may start. Thread-safe.

    `decode_waits` returns whether any job waits for decode: its blocks will soon be used and freed.
    """

    def __init__(
        self,
        kv: KVStore,
        cluster_state: ClusterState,
        name: str,
        decode_waits: Callable[[], bool],
        clock: Clock = time.monotonic,
    ) -> None:
        self._kv = kv
        self._cluster_state = cluster_state
        self._name = name
        self._decode_waits = decode_waits
        self._clock = clock
        self._refused_bytes = 0  # bytes that the last refused job needed; 0 while admission is open
        self._next_look = 0.0
        # Time of the last check that found a job waiting for decode, or of the last refusal if that was later.
        self._idle_since = 0.0
        self._hopeless_until = 0.0
        self._last_usage = StoreUsage(0, 0)
        self._asked_at = -math.inf
        self._granted_bytes = 0  # bytes granted since the store's size was last read
        self._lock = threading.Lock()
        self._numbers = count()  # one worker can have several reservations, and the number makes each name unique

    def is_open(self) -> bool:
        """Return whether to take a job now.

        Checks the store at most twice a second, and evicts shared blocks if allowed.
        """
        with self._lock:
            if not self._refused_bytes:
                return True
            now = self._clock()
            if now < self._next_look:
                return False
            self._next_look = now + _LOOK_EVERY_S
            try:
                may_try = self._find_capacity(self._refused_bytes) or self._is_hopeless()
            except StoreUnavailable:
                may_try = True  # the job will find the store unavailable, and go on without a KV cache
            if may_try:
                self._refused_bytes = 0
            return may_try

    def reserve(self, measure: Callable[[], int]) -> AbstractContextManager[None]:
        """Reserve what a job will store, for the length of a `with` block.

        `measure()` returns how many bytes are not stored yet, now and later.

        Raises NoCapacity, and closes admission until there may be room. Raises StoreUnavailable if there will be no
        room, or if the store doesn't answer.
        """
        size = measure()
        with self._lock:
            now = self._clock()
            if now - self._asked_at > _KNOWN_FOR_S or self._is_near_full(size):
                self._last_usage, self._asked_at, self._granted_bytes = self._kv.usage(), now, 0
            usage, mark = self._last_usage, high_water_mark(self._last_usage)
            negligible = size <= mark * _NEGLIGIBLE and not self._is_near_full(size)
            reservation: AbstractContextManager[None] = nullcontext()
            if usage.max_bytes and size and not negligible:
                if size > mark:
                    raise StoreUnavailable(
                        f"the KV cache takes {size:,} bytes, but all KV caches together are allowed only {mark:,}"
                    )
                name = f"{self._name}.{next(self._numbers)}"
                if not self._cluster_state.reserve(name, size, mark - usage.used_bytes, RESERVATION_TTL_S):
                    self._refuse(size)
                reservation = _keep_reserved(self._cluster_state, name, measure)
            self._hopeless_until = 0.0
            self._granted_bytes += size
            return reservation

    def _refuse(self, size: int) -> NoReturn:
        if self._clock() < self._hopeless_until and not self._decode_waits():
            raise StoreUnavailable(
                f"the store has no room for {size:,} bytes, and no job waits for decode, so no memory will become free"
            )
        log.info("the store has no room for %s bytes: taking no jobs until it has", f"{size:,}")
        self._refused_bytes = size
        self._idle_since = self._clock()
        self._next_look = 0.0
        raise NoCapacity(f"the store has no room for {size:,} bytes now")

    def _is_near_full(self, size: int) -> bool:
        """Whether the store may be near full with `size` and all that was granted since it was last asked.

        A quarter of the mark counts as near, because a few more workers may have granted as much.
        """
        usage = self._last_usage
        return bool(usage.max_bytes) and 4 * (usage.used_bytes + self._granted_bytes + size) > high_water_mark(usage)

    def _find_capacity(self, size: int) -> bool:
        """Whether `size` bytes would be granted now. If allowed, shared blocks are evicted for that."""
        usage = self._kv.usage()
        if not usage.max_bytes:
            return True
        mark = high_water_mark(usage)
        deficit_bytes = size + self._cluster_state.reserved_bytes() + usage.used_bytes - mark
        if deficit_bytes > 0 and self._idle_s() >= _IDLE_FOR_SURE_S:
            freed_bytes = self._kv.free_shared(deficit_bytes + int(mark * _SPARE))
            log.info("freed %s bytes of shared blocks, the least recently used ones", f"{freed_bytes:,}")
            deficit_bytes -= freed_bytes
        return deficit_bytes <= 0

    def _is_hopeless(self) -> bool:
        if self._idle_s() < _PATIENCE_S:
            return False
        log.warning("the store stays full, and no job waits for decode: going on without KV caches for a while")
        self._hopeless_until = self._clock() + _HOPELESS_FOR_S
        return True

    def _idle_s(self) -> float:
        """Return for how long no check has found a job that waits for decode."""
        now = self._clock()
        if self._decode_waits():
            self._idle_since = now
        return now - self._idle_since


@contextmanager
def _keep_reserved(cluster_state: ClusterState, name: str, measure: Callable[[], int]) -> Iterator[None]:
    """Renew a reservation within the block, and free it at the end.

    The reservation shrinks as the job's records are stored. Otherwise they would count twice, and other jobs would wait
    for nothing.
    """
    stop_event = threading.Event()

    def renew() -> None:
        while not stop_event.wait(RENEW_EVERY_S):
            try:
                cluster_state.reserve(name, measure(), _NO_LIMIT, RESERVATION_TTL_S)
            except StoreUnavailable as error:
                # An expired reservation does little harm, because the store's reported size already includes the stored
                # records.
                log.info("the reservation was not renewed: %s", error)

    thread = threading.Thread(target=renew, name="reservation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
        cluster_state.unreserve(name)

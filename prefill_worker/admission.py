"""Whether the store has room for one more prompt's KV cache.

Prefill takes no job while there is no room, and reserves the space that a job will need before it starts. So two
prefills can't each fill a store with half a cache. Decode never waits for admission. While jobs wait for decode,
prefill waits too, because each of those jobs will free its blocks. If no job waits for decode, the least recently used
shared blocks are deleted. If even that makes no room, jobs go on without their KV cache.
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

Clock = Callable[[], float]  # seconds; never runs backwards

# Share of the store's maximum that KV caches may fill. The rest is for results, registrations, and anything that
# reservations did not foresee.
HIGH_WATER = 0.85
# How soon a dead worker's reservation ends.
RESERVATION_TTL_S = 10.0
RENEW_EVERY_S = 1.0
_NO_LIMIT = 1 << 62
_LOOK_EVERY_S = 0.5
_KNOWN_FOR_S = 1.0  # how long a reading is trusted that says the store is far from full
# How long the decode queues must look empty. A queue's depth may be read as zero by mistake, so a single reading is not
# enough to delete a class's prefix.
_IDLE_FOR_SURE_S = 1.0
# If no job waited for decode for this long and there is still no room, whatever fills the store will not go away soon.
_PATIENCE_S = 10.0
_HOPELESS_FOR_S = 30.0
# A job below this share of the mark reserves nothing while the store is far from full. The reservation would cost two
# round trips and a thread, most of a short prompt's cost, and a hundred such jobs at once take only a tenth of the
# mark.
_NEGLIGIBLE = 1 / 1024
# How much more is freed than one job needs, as a share of the mark. Otherwise every job would have to wait for the next
# look.
_SPARE = 1 / 16


class NoCapacity(Stopped):
    """The store has no capacity for this job now. Nothing was done, and admission is closed until there may be room."""


def high_water_mark(usage: StoreUsage) -> int:
    """Bytes up to which prefill fills the store; 0: no limit."""
    return int(usage.max_bytes * HIGH_WATER)


class Admission:
    """Decides for one prefill worker whether the store has room. Thread-safe.

    `decode_waits` says whether any job waits for decode. The blocks of such a job will soon be used and freed.
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
        self._refused_bytes = 0  # bytes of the last job that found no room; 0: admission is open
        self._next_look = 0.0
        self._idle_since = 0.0  # since this time, no look has found a job that waits for decode
        self._hopeless_until = 0.0
        self._last_usage = StoreUsage(0, 0)
        self._asked_at = -math.inf
        self._granted_bytes = 0  # bytes granted since the store was asked
        self._lock = threading.Lock()
        self._numbers = count()  # numbers the reservations, because several jobs of a worker may hold one each

    def is_open(self) -> bool:
        """Whether to take a job now. Looks at the store at most twice a second, and frees shared blocks if it may."""
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
                may_try = True  # the job will notice, and go on without its KV cache
            if may_try:
                self._refused_bytes = 0
            return may_try

    def reserve(self, measure: Callable[[], int]) -> AbstractContextManager[None]:
        """Reserve space for a job's records for the length of a `with` block.

        `measure()` returns how many bytes are not stored yet. It is called now, and again during the block.

        Raises NoCapacity if there is no room now, and closes admission until there may be. Raises StoreUnavailable if
        there will never be room, or if the store can't be asked.
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
                        f"the KV cache takes {size:,} bytes, more than the {mark:,} that all may take together"
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
            raise StoreUnavailable(f"no room for {size:,} bytes, and no job waits for decode that would free some")
        log.info("the store has no room for %s bytes: taking no job until it has", f"{size:,}")
        self._refused_bytes = size
        self._idle_since = self._clock()
        self._next_look = 0.0
        raise NoCapacity(f"no room for {size:,} bytes for now")

    def _is_near_full(self, size: int) -> bool:
        """Whether the store would be more than a quarter full with `size` and everything granted since it was asked.
        The margin is this wide because a few other workers may grant space at the same time."""
        usage = self._last_usage
        return bool(usage.max_bytes) and 4 * (usage.used_bytes + self._granted_bytes + size) > high_water_mark(usage)

    def _find_capacity(self, size: int) -> bool:
        """Whether `size` bytes could be granted now, after shared blocks were freed if that is allowed."""
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
        log.warning("the store stays full, and nothing waits for decode: going on without KV caches for a while")
        self._hopeless_until = self._clock() + _HOPELESS_FOR_S
        return True

    def _idle_s(self) -> float:
        """For how many seconds no look has found a job that waits for decode."""
        now = self._clock()
        if self._decode_waits():
            self._idle_since = now
        return now - self._idle_since


@contextmanager
def _keep_reserved(cluster_state: ClusterState, name: str, measure: Callable[[], int]) -> Iterator[None]:
    """Renew a reservation, shrink it as the job's records arrive in the store, and free it at the end.

    If it did not shrink, stored records would count twice, and other workers would wait.
    """
    stop_event = threading.Event()

    def renew() -> None:
        while not stop_event.wait(RENEW_EVERY_S):
            try:
                cluster_state.reserve(name, measure(), _NO_LIMIT, RESERVATION_TTL_S)
            except StoreUnavailable as error:  # the put will fail too, and report it
                log.info("the reservation was not renewed: %s", error)

    thread = threading.Thread(target=renew, name="reservation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
        cluster_state.unreserve(name)

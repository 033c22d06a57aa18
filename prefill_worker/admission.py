"""Whether the store has room for one more prompt's KV cache.

Prefill takes no job while there is none, and reserves what a job will take before it starts; so two prefills never
meet at a full store with half a cache each. Decode never waits for any of this. While jobs wait for decode, waiting
is right: each of them frees its blocks. With nothing waiting there the shared blocks that were not used for longest
go; and where even that makes no room, jobs go on without their KV cache.
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

Clock = Callable[[], float]  # seconds; never goes back

# Of the store's maximum: the rest is for results, registrations, and what a reservation did not foresee.
HIGH_WATER = 0.85
# A dead worker's reservation ends this soon.
RESERVATION_TTL_S = 10.0
RENEW_EVERY_S = 1.0
_NO_LIMIT = 1 << 62
_LOOK_EVERY_S = 0.5
_KNOWN_FOR_S = 1.0  # how long a reading far from full is trusted
# A queue's depth may be read as zero by mistake: once is not enough to throw a class's prefix away.
_IDLE_FOR_SURE_S = 1.0
# Nothing waited for decode for this long, and still there is no room: whoever fills the store will not leave it soon.
_PATIENCE_S = 10.0
_HOPELESS_FOR_S = 30.0
# A job that takes no more of the mark reserves nothing while the store is far from full: two round trips and a thread
# would be most of a short prompt's cost, and a hundred such jobs at once are a tenth of the mark.
_NEGLIGIBLE = 1 / 1024
# Freed beyond what one job needs, as a share of the mark: or every single job would have to wait for the next look.
_SPARE = 1 / 16


class NoCapacity(Stopped):
    """The store has no capacity for this job now; nothing was done, and admission is shut until it may have."""


def high_water_mark(usage: StoreUsage) -> int:
    """Bytes up to which prefill fills the store; 0: it has no limit."""
    return int(usage.max_bytes * HIGH_WATER)


class Admission:
    """One prefill worker's door to the store. Thread-safe.

    `decode_waits` says whether any job waits for decode: its blocks are then about to be used and freed.
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
        self._refused_bytes = 0  # bytes of the last job that found no room; 0: the door is open
        self._next_look = 0.0
        self._idle_since = 0.0  # at every look since then nothing waited for decode
        self._hopeless_until = 0.0
        self._last_usage = StoreUsage(0, 0)
        self._asked_at = -math.inf
        self._granted_bytes = 0  # bytes since then
        self._lock = threading.Lock()
        self._numbers = count()  # numbers of reservations: several of a worker's jobs may hold one

    def is_open(self) -> bool:
        """Whether to take a job now. Looks at the store at most twice a second, and makes room where it may."""
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
                may_try = True  # the job will find out, and go on without
            if may_try:
                self._refused_bytes = 0
            return may_try

    def reserve(self, measure: Callable[[], int]) -> AbstractContextManager[None]:
        """Reserve what a job will store, for the length of a `with` block.

        `measure()` says how many bytes are not stored yet, now and later.

        Raises NoCapacity, and shuts the door until there may be some. Raises StoreUnavailable if there will be none, or
        if the store can't say.
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
                        f"{size:,} bytes are more than the {mark:,} that all KV caches may take together"
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
            raise StoreUnavailable(f"no room for {size:,} bytes, and nothing waits for decode that would free some")
        log.info("the store has no room for %s bytes: taking no job until it has", f"{size:,}")
        self._refused_bytes = size
        self._idle_since = self._clock()
        self._next_look = 0.0
        raise NoCapacity(f"no room for {size:,} bytes for now")

    def _is_near_full(self, size: int) -> bool:
        """With `size` and all that we granted since the store was asked. A quarter counts as near, for there may be a
        few more workers, who grant as we do."""
        usage = self._last_usage
        return bool(usage.max_bytes) and 4 * (usage.used_bytes + self._granted_bytes + size) > high_water_mark(usage)

    def _find_capacity(self, size: int) -> bool:
        """Whether `size` bytes would be granted now, after shared blocks were freed if they may be."""
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
        """For how long no look has found a job that waits for decode."""
        now = self._clock()
        if self._decode_waits():
            self._idle_since = now
        return now - self._idle_since


@contextmanager
def _keep_reserved(cluster_state: ClusterState, name: str, measure: Callable[[], int]) -> Iterator[None]:
    """Renew a reservation, which shrinks as the job's records arrive; free it in the end.

    Without that they would count twice, and keep the neighbours waiting.
    """
    stop_event = threading.Event()

    def renew() -> None:
        while not stop_event.wait(RENEW_EVERY_S):
            try:
                cluster_state.reserve(name, measure(), _NO_LIMIT, RESERVATION_TTL_S)
            except StoreUnavailable as error:  # what was put there shows it too
                log.info("the reservation was not renewed: %s", error)

    thread = threading.Thread(target=renew, name="reservation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
        cluster_state.unreserve(name)

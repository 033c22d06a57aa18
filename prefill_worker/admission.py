"""Whether the store has room for one more prompt's KV cache.

Prefill takes no job while there is none, and reserves what a job will take before it starts; so two prefills never
meet at a full store with half a cache each. Decode never waits for any of this. There is always a way out: with
nothing waiting for decode the shared blocks that were not used for longest go, and a job that does not fit at all is
passed on without its KV cache.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.base import Board, KVStore
from messages.errors import StoreUnavailable

log = logging.getLogger(__name__)

# Of the store's maximum: the rest is for results, cards, and what a reservation did not foresee.
HIGH_WATER = 0.85
RESERVATION_TTL_S = 60.0
_LOOK_EVERY_S = 0.5
# Shut for longer than this, the door opens all the same: the job then goes on without KV, but it goes on.
MAX_SHUT_S = 20.0


class Admission:
    """One prefill worker's door to the store.

    `decode_waits` says whether any job of this model waits for decode: its blocks are then about to be used and freed.
    """

    def __init__(self, kv: KVStore, board: Board, name: str, decode_waits: Callable[[], bool]) -> None:
        self._kv = kv
        self._board = board
        self._name = name
        self._decode_waits = decode_waits
        self._wanted = 0  # bytes of the last job that found no room
        self._shut_since = 0.0
        self._next_look = 0.0

    def is_open(self) -> bool:
        """Whether to take a job now. Looks at the store at most twice a second, and makes room where it may."""
        if not self._wanted:
            return True
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_EVERY_S
        if self._has_room(self._wanted) or now - self._shut_since > MAX_SHUT_S:
            self._wanted = 0
            return True
        return False

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve room for a job; False: shut the door until there may be some. A store that can't say grants it."""
        try:
            room = self._room()
        except StoreUnavailable:
            return True
        if room is None or self._board.reserve(self._name, size_bytes, room, RESERVATION_TTL_S):
            self._wanted = 0
            return True
        if not self._wanted:
            log.info("the store has no room for %s bytes: waiting", f"{size_bytes:,}")
            self._shut_since = time.monotonic()
        self._wanted = size_bytes
        return False

    def never_fits(self, size_bytes: int) -> bool:
        """Whether the store is too small for this job even when empty."""
        try:
            limit = self._kv.usage().max_bytes
        except StoreUnavailable:
            return False
        return bool(limit) and size_bytes > limit * HIGH_WATER

    def waited_long(self) -> bool:
        """Whether the door was shut as long as it may be."""
        return bool(self._shut_since) and time.monotonic() - self._shut_since > MAX_SHUT_S

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Keep a granted reservation alive, and give it up at the end."""
        done = threading.Event()
        thread = threading.Thread(target=self._renew, args=(size_bytes, done), name="reservation", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self._shut_since = 0.0
            self._board.unreserve(self._name)

    def _renew(self, size_bytes: int, done: threading.Event) -> None:
        while not done.wait(RESERVATION_TTL_S / 3):
            self._board.reserve(self._name, size_bytes, 1 << 62, RESERVATION_TTL_S)

    def _room(self) -> int | None:
        """Bytes that reservations may add up to; None: the store has no limit."""
        usage = self._kv.usage()
        return int(usage.max_bytes * HIGH_WATER) - usage.used_bytes if usage.max_bytes else None

    def _has_room(self, size_bytes: int) -> bool:
        try:
            room = self._room()
            if room is None:
                return True
            missing = size_bytes + self._board.reserved_bytes() - room
            if missing > 0 and not self._decode_waits():
                freed = self._kv.free_shared(missing)
                log.info("freed %s bytes of shared blocks", f"{freed:,}")
                missing -= freed
        except StoreUnavailable:
            return True
        return missing <= 0

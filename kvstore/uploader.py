"""Stores blocks in the background while prefill computes the next ones."""

import threading
import time
from collections import deque
from dataclasses import dataclass

from kvstore.base import KVStore
from kvstore.blocks import BlockRef
from messages.kv import KVLayout, Record

MAX_PENDING_BLOCKS = 16  # at most 64 MiB; another 64 MiB can be on the way to the store


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What was stored, and the seconds of storing that computing did not hide."""

    bytes: int
    exposed_s: float  # time spent in `finish`


class Uploader:
    """The upload of one KV transfer: a thread, and a queue that makes the caller wait if the store is slower.

    Without `background` there is no thread, and `finish` stores the records. This is for records that are stored faster
    than a thread starts. Used by one thread.
    """

    def __init__(
        self,
        store: KVStore,
        fingerprint: str,
        layout: KVLayout,
        max_pending_blocks: int = MAX_PENDING_BLOCKS,
        background: bool = True,
    ) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._layout = layout
        self._max_pending = max_pending_blocks
        self._pending: deque[tuple[BlockRef, Record]] = deque()
        self._condition = threading.Condition()
        self._ending = False  # True if no more records will be put
        self._dropping = False  # whether the upload was abandoned or has failed
        self._error: Exception | None = None
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, name="kv-upload", daemon=True) if background else None
        if self._thread:
            self._thread.start()

    def put(self, ref: BlockRef, record: Record) -> None:
        """Add one record. Waits while too many are pending. After an error the record is dropped; see `finish`."""
        if self._ending:
            raise ValueError("the upload has ended, so it takes no more records")
        if self._thread is None:
            self._pending.append((ref, record))
            return
        with self._condition:
            self._condition.wait_for(lambda: self._dropping or len(self._pending) < self._max_pending)
            if not self._dropping:
                self._pending.append((ref, record))
                self._condition.notify_all()

    def finish(self) -> UploadReport:
        """Wait until everything is stored. Raises the store's first error, usually StoreUnavailable."""
        start = time.perf_counter()
        with self._condition:
            self._ending = True
            self._condition.notify_all()
        self._thread.join() if self._thread else self._run()
        if self._error:
            raise self._error
        return UploadReport(self._bytes, time.perf_counter() - start)

    def abandon(self) -> None:
        """Drop pending records and return at once.

        The thread ends after the records that it is storing now. Idempotent.
        """
        self._ending = True
        self._drop()

    def _drop(self) -> None:
        with self._condition:
            self._dropping = True
            self._pending.clear()
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending or self._ending)
                batch = list(self._pending)
                self._pending.clear()
                self._condition.notify_all()
            if not batch:
                return
            try:
                stored_bytes = self._store.put(self._fingerprint, self._layout, batch)
            except Exception as error:  # noqa: BLE001  `finish` raises it in the caller's thread
                self._error = error
                return self._drop()
            self._bytes += stored_bytes

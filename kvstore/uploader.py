"""Stores blocks in the background while prefill computes the next ones."""

import threading
import time
from collections import deque
from dataclasses import dataclass

from kvstore.base import KVStore
from kvstore.blocks import BlockRef
from messages.kv import KVLayout, Record

MAX_PENDING_BLOCKS = 16  # at most 64 MiB; as many again may be under way in the store's pipeline


@dataclass(frozen=True, slots=True)
class UploadReport:
    """What was stored, and the seconds that the upload took after computing had ended."""

    bytes: int
    exposed_s: float  # spent in `finish`


class Uploader:
    """The upload of one KV transfer: a thread, and a bounded queue that makes the caller wait when the store is slower.

    Without `background` there is no thread, and `finish` stores everything. This suits small caches, which are stored
    faster than a thread starts. Only one thread may use it.
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
        self._ending = False  # no more puts will come
        self._dropping = False  # abandoned or failed
        self._error: Exception | None = None
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, name="kv-upload", daemon=True) if background else None
        if self._thread:
            self._thread.start()

    def put(self, ref: BlockRef, record: Record) -> None:
        """Queue one record for storing; waits while too many are pending. After an error the record is dropped, and
        `finish` raises the error."""
        if self._ending:
            raise ValueError("the upload has been finished or abandoned")
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
        """Drop what is pending and return at once. The thread ends after the record that it is storing now.
        Idempotent."""
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
            except Exception as error:  # noqa: BLE001  `finish` raises it in the caller's thread, which can handle it
                self._error = error
                return self._drop()
            self._bytes += stored_bytes

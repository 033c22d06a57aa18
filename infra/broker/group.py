"""Work that is cheaper for many at once: while one group is under way, the next one gathers.

With one item now and then each is a group of its own, and waits for nobody. A database calls it group commit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class Group(Generic[T]):
    """Gives items to `work` in a thread of its own, as many as there are, in order. What `work` raises is logged.

    While `most` or more are unfinished `add` waits. Thread-safe.
    """

    def __init__(self, name: str, work: Callable[[list[T]], None], most: int) -> None:
        self._name = name
        self._work = work
        self._most = most
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._under_way: list[T] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, *items: T) -> None:
        """Have these done soon."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._under_way) + len(self._waiting) < self._most)
            self._waiting += items
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def unfinished(self) -> list[T]:
        """A snapshot."""
        with self._changed:
            return self._under_way + self._waiting

    def finish(self) -> None:
        """Return when everything added so far is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way and not self._waiting)

    def close(self) -> None:
        """Finish, and end the thread. Nothing may be added after that."""
        self.finish()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._under_way, self._waiting = self._waiting, []
            if not self._under_way:
                return
            try:
                self._work(self._under_way)
            except Exception:  # a bug of ours must not end the thread that everybody waits for
                log.exception("%s: bug", self._name)
            with self._changed:
                self._under_way = []
                self._changed.notify_all()

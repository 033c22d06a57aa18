"""How many requests are under way, and how long together: of each key, and of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gateway.refusal import ApiError
from messages.limits import (
    MAX_BODIES_BYTES,
    MAX_BODIES_BYTES_PER_KEY,
    MAX_OPEN,
    MAX_OPEN_PER_KEY,
    MAX_UPLOADS_PER_KEY,
)


class Places:
    """Without keys everybody has the same name: then the bounds of one key are those of all. In the event loop."""

    def __init__(self, on_change: Callable[[int], None]) -> None:
        """`on_change` is told how many requests are under way."""
        self._on_change = on_change
        self.requests: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.body_bytes: Counter[str] = Counter()

    def enter(self, key: str, is_upload: bool) -> Place:
        """A place for a request; `leave` it. Raises ApiError if there is none."""
        for number, most, words in (
            (self.requests[key], MAX_OPEN_PER_KEY, "requests of this key"),
            (self.requests.total(), MAX_OPEN, "requests"),
            (self.uploads[key] if is_upload else 0, MAX_UPLOADS_PER_KEY, "uploads of this key"),
        ):
            if number >= most:
                raise ApiError(429, f"{most} {words} are under way already", code="too_many_requests", retry_s=1)
        self.count(key, 1, is_upload)
        return Place(self, key, is_upload)

    def count(self, key: str, change: int, is_upload: bool) -> None:
        """A request more, or one less."""
        self.requests[key] += change
        self.uploads[key] += change * is_upload
        self._on_change(self.requests.total())


@dataclass
class Place:
    """One request's."""

    _places: Places
    _key: str
    _is_upload: bool
    _body_bytes: int = 0

    def take(self, size: int) -> None:
        """So many bytes of its body have come. Raises ApiError if those of all are too many."""
        if self._is_upload:  # it goes to disk as it comes
            return
        self._body_bytes += size
        held = self._places.body_bytes
        held[self._key] += size
        if held[self._key] > MAX_BODIES_BYTES_PER_KEY or held.total() > MAX_BODIES_BYTES:
            raise ApiError(429, "the requests under way are too long together", code="too_many_bytes", retry_s=1)

    def leave(self) -> None:
        """It is over."""
        self._places.body_bytes[self._key] -= self._body_bytes
        self._places.count(self._key, -1, self._is_upload)

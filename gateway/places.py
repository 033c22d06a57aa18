"""Limits on the requests under way, and on the size of their bodies and files: for each key, and for all together."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.refusal import ApiError
from messages.limits import (
    MAX_BODIES_BYTES,
    MAX_BODIES_BYTES_PER_KEY,
    MAX_OPEN,
    MAX_OPEN_PER_KEY,
    MAX_UPLOADS_BYTES,
    MAX_UPLOADS_BYTES_PER_KEY,
)

Take = Callable[[int], None]


class Places:
    """Counts requests and bytes by key. Without keys all requests have the same name, so one key's limits apply to all.

    Must be used in the event loop.
    """

    def __init__(self, on_change: Callable[[int], None]) -> None:
        """`on_change` is called with the number of requests under way."""
        self._on_change = on_change
        self._requests: Counter[str] = Counter()
        self._body_bytes: Counter[str] = Counter()
        self._file_bytes: Counter[str] = Counter()  # bytes of the uploads under way

    @contextmanager
    def one(self, key: str, is_upload: bool) -> Iterator[Take]:
        """Hold a place for a request, and yield a function to call with the size of each piece of its body.

        Both raise ApiError if a limit is reached.
        """
        taken, counts, bounds = 0, self._body_bytes, (MAX_BODIES_BYTES_PER_KEY, MAX_BODIES_BYTES)
        if is_upload:
            counts, bounds = self._file_bytes, (MAX_UPLOADS_BYTES_PER_KEY, MAX_UPLOADS_BYTES)

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            counts[key] += size
            _require_room(counts, key, bounds, f"bytes of {'files' if is_upload else 'requests'}")

        self._requests[key] += 1
        try:
            _require_room(self._requests, key, (MAX_OPEN_PER_KEY, MAX_OPEN), "requests")
            self._on_change(self._requests.total())
            yield take
        finally:
            self._requests[key] -= 1
            counts[key] -= taken
            self._on_change(self._requests.total())


def _require_room(counts: Counter[str], key: str, bounds: tuple[int, int], words: str) -> None:
    for number, most in zip((counts[key], counts.total()), bounds, strict=True):
        if number > most:
            raise ApiError(
                429, f"{most:,} {words} are already under way: try again later", code="too_many_requests", retry_s=1
            )

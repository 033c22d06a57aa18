"""A recent view of the fleet.

It is asked for in the background, so that an unreachable broker does not block a page.
"""

import threading
from collections.abc import Callable

from desk.backend import FleetView


class FleetWatch:
    """Asks in a separate thread, one question at a time, and only while somebody looks."""

    def __init__(self, ask: Callable[[], FleetView]) -> None:
        """`ask` may block. It reports problems in the fleet's `problem`."""
        self._ask = ask
        self._last_view: FleetView | None = None
        self._lock = threading.Lock()
        self._asking = False

    def look(self) -> FleetView | None:
        """Return the last answer at once, or None before the first, and ask again."""
        with self._lock:
            if not self._asking:
                self._asking = True
                threading.Thread(target=self._update, name="desk-fleet", daemon=True).start()
            return self._last_view

    def _update(self) -> None:
        view: FleetView | None = None
        try:
            view = self._ask()
        finally:
            with self._lock:
                self._asking = False
                self._last_view = view or self._last_view

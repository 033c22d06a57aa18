"""Watches whether a llama-server still answers: a hung one holds its connections open, and its jobs for ever.

It answers /health while it computes and while it loads, so silence means that it is stopped or stuck.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from engines.llamacpp.http import LlamaServer

_log = logging.getLogger(__name__)
PATIENCE_S = 10.0
_EVERY_S = 2.0


class HealthWatch:
    """Asks every other second. After `patience_s` without an answer the server's requests end as transient errors.

    A server that is gone, or still loads, is away: its worker takes no jobs.
    """

    def __init__(self, server: LlamaServer, patience_s: float, on_silence: Callable[[], None] = lambda: None) -> None:
        """`on_silence` is called in the watching thread, after each question that had no answer."""
        self._server = server
        self._patience_s = patience_s
        self._on_silence = on_silence
        server.is_watched = True
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="llama-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, at once if the server was closed before. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(_EVERY_S):
            if self._server.is_silent(self._patience_s) and not self._closing.is_set():
                _log.warning("%s has not answered /health for %g s", self._server.url, self._patience_s)
                self._on_silence()

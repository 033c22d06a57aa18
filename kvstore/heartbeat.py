"""Keeps a worker's registration and its claims alive, in a separate thread."""

import os
import secrets
import socket
import threading
from collections.abc import Callable

from kvstore.base import ClusterState
from messages.workers import WorkerInfo

BEAT_S = 1.0
# A dead worker's jobs can be claimed again after this time. It is as long as three heartbeats, so that a worker with
# one late heartbeat doesn't count as dead.
CLAIM_TTL_S = 3.0
REGISTRATION_TTL_S = 5.0


def new_worker_id() -> str:
    """Return an id of the form host.pid.random, which is unique to this process and readable in a log."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname().split(".")[0])[:40] or "host"
    return f"{host}.{os.getpid()}.{secrets.token_hex(3)}"


class Heartbeat:
    """Publishes `registration()` and calls `renew()`, which renews claims, once a second until it is closed.

    Closing removes the registration.
    """

    def __init__(
        self, cluster_state: ClusterState, registration: Callable[[], WorkerInfo], renew: Callable[[], object]
    ) -> None:
        self._cluster_state = cluster_state
        self._registration = registration
        self._renew = renew
        self._closed = threading.Event()
        self._worker_id = registration().worker_id
        self._cluster_state.register(registration(), REGISTRATION_TTL_S)
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat {self._worker_id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and remove the registration. Idempotent."""
        self._closed.set()
        self._thread.join()
        self._cluster_state.unregister(self._worker_id)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._cluster_state.register(self._registration(), REGISTRATION_TTL_S)
            self._renew()

"""Faults of a broker's connections."""

import threading
from typing import Any

from infra.broker.embedded.broker import EmbeddedBroker

_CUT_S = 5.0


def drop(broker: Any) -> None:
    """Cut its connections without a word, as a network fault would: what is unacked goes back, and they come again."""
    if isinstance(broker, EmbeddedBroker):
        with broker.server.lock:
            broker._lose_all()
        return
    for connection in (broker._publishing, broker._consuming):
        cut = threading.Event()
        connection.submit(lambda connection=connection: connection._cut("cut on purpose"))
        connection.submit(cut.set)
        assert cut.wait(_CUT_S), "it did not cut the connection"

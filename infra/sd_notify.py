"""Reports a worker's state to systemd by the datagrams of sd_notify(3). Does nothing if NOTIFY_SOCKET is not set.

A unit needs `NotifyAccess=main`. The worker itself enables the watchdog once its model is loaded. Before that it sends
no signs of life, and a worker of an older release never sends any.
"""

import os
import socket
from contextlib import suppress

WATCHDOG_S = 300  # a worker that is silent for this long is restarted; other workers get its jobs after a minute


def notify(state: str) -> None:
    """Send a state if NOTIFY_SOCKET is set. Never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)

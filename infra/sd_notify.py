"""Reports a worker's state to systemd with the datagrams of sd_notify(3). Does nothing without NOTIFY_SOCKET.

The unit needs `NotifyAccess=main`. The worker itself asks for the watchdog once its model is loaded: until then it
gives no signs of life, and a worker of an older release never does.
"""

import os
import socket
from contextlib import suppress

WATCHDOG_S = 300  # systemd restarts a worker that is silent for this long; other workers get its jobs after a minute


def notify(state: str) -> None:
    """Send a state, if systemd listens. Never raises."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)

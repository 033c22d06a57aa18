"""Tells systemd how a worker fares, by the datagrams of sd_notify(3); nothing where no NOTIFY_SOCKET is named.

A unit needs `NotifyAccess=main`. The watchdog is asked for by the worker itself, once its model is loaded: until then
it gives no signs of life, and a worker of an older release never does.
"""

import os
import socket
from contextlib import suppress

WATCHDOG_S = 300  # without a sign for so long it is started again; others have its jobs after a minute


def notify(state: str) -> None:
    """Send a state, if anybody wants it. Raises nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)

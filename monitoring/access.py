"""Which requests a server on this machine answers. The gateway (without keys), the desk and the workers' pages share
this check.

Without keys, a client is admitted because it is on this machine. But any web page can make a browser on this machine
send requests, and can read the answers if the page's own host name resolves to this machine (DNS rebinding). So a
request's Host header must name this machine, and its Origin header must not name another.
"""

import functools
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = ("localhost", LOOPBACK, "::1")
# Names in these domains can't be made to resolve here from outside.
_PRIVATE_DOMAINS = ("internal", "lan", "local", "localhost")

_Message = MutableMapping[str, Any]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def why_not(listens_on: str, host: str, origin: str | None, names: Collection[str] = ()) -> str:
    """Why a request with these headers is refused, as a sentence; "" if it is allowed.

    `names`: other names that resolve only to this machine, such as `host.docker.internal` from a container.
    """
    name = _hostname(f"//{host}")
    if name not in names and not _names_us(name, listens_on):
        return "requests are answered only under this machine's own names and addresses"
    if origin and not _names_us(_hostname(origin), listens_on):
        return "requests from web pages of other hosts are not answered"
    return ""


class HostGuard:
    """ASGI middleware that checks HTTP and WebSocket requests of an application that listens on `listens_on`."""

    def __init__(self, app: Callable[..., Awaitable[None]], listens_on: str) -> None:
        self._app = app
        self._listens_on = listens_on

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        """Handle one request or one WebSocket."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        problem = why_not(self._listens_on, headers.get(b"host", ""), headers.get(b"origin"))
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": problem.encode()})


def _names_us(name: str | None, listens_on: str) -> bool:
    """Whether a name can only mean this machine, or, if the server listens on the network, a machine in its own
    network."""
    if name is None or name in (*_LOOPBACK_NAMES, listens_on):
        return name is not None
    if is_loopback(listens_on):
        return False
    _, dot, domain = name.rpartition(".")
    return _is_address(name) or not dot or domain in _PRIVATE_DOMAINS or name in _own_names()


@functools.cache
def _own_names() -> tuple[str, ...]:
    return socket.gethostname().lower(), socket.getfqdn().lower()


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # brackets around something that is not an IPv6 address
        return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

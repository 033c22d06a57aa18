"""Which requests are answered: the check of the gateway without keys, the desk, and the workers' pages.

Where no key is needed, access is limited to this machine. But any web page can make a browser on this machine send
requests, and read the answers if its own name resolves to this machine (DNS rebinding). So a request must name this
machine in its Host header, and must not come from a page of another machine.
"""

import functools
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = ("localhost", LOOPBACK, "::1")
_PRIVATE_DOMAINS = ("internal", "lan", "local", "localhost")  # nobody can register a public name in these domains

_Message = MutableMapping[str, Any]


def is_loopback(host: str) -> bool:
    """Whether a server that listens on this host can be reached only from this machine."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def why_not(listens_on: str, host: str, origin: str | None, names: Collection[str] = ()) -> str:
    """Return why a request with these headers is refused, as a sentence; "" if it is answered.

    `names` are other names that lead only to this machine, such as `host.docker.internal` from a container.
    """
    name = _hostname(f"//{host}")
    if name not in names and not _names_us(name, listens_on):
        return "requests are answered only under this machine's own names and addresses"
    if origin and not _names_us(_hostname(origin), listens_on):
        return "requests from web pages of other hosts are not answered"
    return ""


class HostGuard:
    """ASGI middleware that checks HTTP requests and WebSockets of an application that listens on `listens_on`."""

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
    """Whether a name can only mean this machine, or a machine in its own network if the application listens there."""
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
    except ValueError:  # the URL has brackets without a valid IPv6 address
        return None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

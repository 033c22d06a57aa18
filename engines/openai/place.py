"""Whether a server is inside: on this machine or in a private network, where prompts may go without being asked."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

_INSIDE = [
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "0.0.0.0/32"),
        *("::1/128", "fc00::/7", "fe80::/10", "::/128"),
    )
]
_INSIDE_NAMES = (".local", ".localhost", ".internal", ".home.arpa")


def outside(url: str) -> str:
    """The host of a URL if it is outside, "" if it is inside. A name is where all of its addresses are.

    A name without an address is inside if its ending is kept for private networks. Blocks while it looks names up.
    """
    host = urlsplit(url).hostname or ""
    try:
        addresses = {
            str(address_info[4][0]) for address_info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        return "" if f".{host}".endswith(_INSIDE_NAMES) else host
    return "" if all(_is_inside(address) for address in addresses) else host


def is_fixed_address(url: str) -> bool:
    """Whether its host is an address or `localhost`: where it is needs no looking up, and won't change."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host.replace(".", "").isdigit() or ":" in host


def _is_inside(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    ipv4 = getattr(ip, "ipv4_mapped", None) or ip
    return any(ipv4 in network for network in _INSIDE)

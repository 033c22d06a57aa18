"""URLs that name several hosts of a service, by preference, which urlsplit can't read."""

import re

CLUSTER = "+cluster"  # ends the scheme of a URL that names nodes of a Redis Cluster
STORE_SCHEMES = ("redis", "rediss", "unix", f"redis{CLUSTER}", f"rediss{CLUSTER}")


def addresses(url: str) -> list[str]:
    """The URL for each of its hosts, which stand in it by preference: `amqp://user@fast:5672,slow:5672/vhost`."""
    userinfo, at, hosts = netloc(url).rpartition("@")
    if "," not in hosts:
        return [url]
    return [with_netloc(url, f"{userinfo}{at}{host}") for host in hosts.split(",")]


def put_hosts(url: str, hosts: str) -> str:
    """The URL with other hosts, and ports."""
    userinfo, at, _ = netloc(url).rpartition("@")
    return with_netloc(url, f"{userinfo}{at}{hosts}")


def with_netloc(url: str, new_netloc: str) -> str:
    """The URL with another user-and-host part. (urlunsplit makes `unix:/path` of `unix:///path`.)"""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{new_netloc}{rest[len(netloc(url)) :]}"


def netloc(url: str) -> str:
    """User, hosts and ports. (urlsplit refuses an IPv6 address among several hosts, in Python of 2025 and later.)"""
    return re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]

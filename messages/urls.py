"""URLs that name several hosts of a service in order of preference. urlsplit can't read them."""

import re

CLUSTER = "+cluster"  # a URL's scheme ends with this suffix if the URL names nodes of a Redis Cluster
STORE_SCHEMES = ("redis", "rediss", "unix", f"redis{CLUSTER}", f"rediss{CLUSTER}")


def addresses(url: str) -> list[str]:
    """One URL for each host, in the order of preference in which `url` lists them:
    `amqp://user@fast:5672,slow:5672/vhost`."""
    userinfo, at, hosts = netloc(url).rpartition("@")
    if "," not in hosts:
        return [url]
    return [with_netloc(url, f"{userinfo}{at}{host}") for host in hosts.split(",")]


def put_hosts(url: str, hosts: str) -> str:
    """The URL with other hosts and ports."""
    userinfo, at, _ = netloc(url).rpartition("@")
    return with_netloc(url, f"{userinfo}{at}{hosts}")


def with_netloc(url: str, new_netloc: str) -> str:
    """The URL with another user-and-host part. (urlunsplit would turn `unix:///path` into `unix:/path`.)"""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{new_netloc}{rest[len(netloc(url)) :]}"


def netloc(url: str) -> str:
    """User, hosts and ports. (Since 2025, Python's urlsplit refuses an IPv6 address among several hosts.)"""
    return re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]

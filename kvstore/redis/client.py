"""What the store and the cluster state share of Redis: how a client is opened, and what its errors become."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from kvstore.redis.links import GLANCE_S, Links, addresses, connection_class
from messages.errors import ConfigError, StoreUnavailable

SCHEMES = ("redis", "rediss", "unix")
CONNECT_TIMEOUT_S = 5.0
TIMEOUT_S = 15.0  # without any progress; what is asked for at once takes well under a second

_REFUSED_LOGIN = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)


def open_client(url: str, timeout_s: float = TIMEOUT_S, links: Links | None = None) -> redis.Redis:
    """A client for `url`; nothing is sent yet. Raises ConfigError if the URL can't be used.

    `links`: of this URL, of somebody who will close them: a better address is then looked for.
    """
    place(url)
    used = links or Links(url)
    more: dict[str, Any] = {"connection_class": connection_class(used)} if used.several else {}
    try:
        client = redis.Redis.from_url(
            used.urls[0],
            socket_timeout=used.timeout_s(timeout_s),
            socket_connect_timeout=GLANCE_S if used.several else CONNECT_TIMEOUT_S,
            protocol=2,  # redis-py trips over a strange answer to RESP3's HELLO
            # One more try: a pooled connection may have died with its server. All commands used here are idempotent.
            retry=Retry(ConstantBackoff(0.1), 1),
            **more,
        )
    except (ValueError, TypeError):  # its text may hold a piece of the password
        raise ConfigError("the store URL can't be read; it looks like redis://:password@host:6379/0") from None
    if links and links.several:
        links.on_change.append(partial(client.connection_pool.disconnect, inuse_connections=False))
    return client


def place(url: str) -> str:
    """Where a store is, for people: its hosts and ports or a socket's path, never the password. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        places = [urlsplit(each) for each in addresses(url)]
        hosts = [f"{each.hostname or 'localhost'}:{each.port or 6379}" for each in places]
    except ValueError:  # its text may hold a piece of the password
        raise ConfigError(
            "the store URL can't be read: escape '/', '#', '?' and '@' in the password (%2F, %23, %3F, %40)"
        ) from None
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            f"the store URL begins with {parts.scheme!r}; it must be redis://, rediss://, unix:// or memory://"
        )
    return parts.path if parts.scheme == "unix" else " or ".join(hosts)


@contextmanager
def errors_mapped(where: str) -> Iterator[None]:
    """Every way in which Redis or the network to it can fail becomes StoreUnavailable, with `where` in the sentence."""
    try:
        yield
    # RedisClusterException is no RedisError.
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise StoreUnavailable(sentence(error, where)) from error


def sentence(error: Exception, where: str) -> str:
    """What happened, and what to do about it."""
    if isinstance(error, exceptions.OutOfMemoryError):
        return f"the store at {where} is full (Redis reached its maxmemory): nothing more can be stored for now"
    if isinstance(error, _REFUSED_LOGIN):
        return f"the store at {where} refused the login: check user and password in the store URL"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        why = str(error).partition("certificate verify failed:")[2].partition("(_ssl")[0].strip(" .")
        return (
            f"the certificate of the store at {where} is not trusted ({why}): "
            "set store_ca_file to the file of the CA that signed it"
        )
    if isinstance(error, exceptions.TimeoutError | TimeoutError | BlockingIOError):
        return f"the store at {where} did not answer in time"
    if isinstance(error, exceptions.BusyLoadingError):
        return f"the store at {where} is still loading its data"
    if isinstance(error, exceptions.ResponseError):
        return f"the store at {where} refused a command: {error}"
    return f"the store at {where} can't be reached: {error}"

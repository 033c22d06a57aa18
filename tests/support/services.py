"""A broker and a store for tests: what the environment names, else containers, else private processes.

    with services() as pair:
        run(pair.broker_url, pair.store_url)

KVASIR_TEST_BROKER_URL and KVASIR_TEST_STORE_URL come first. A service that can't be had is an error, never a skip.
`python -m tests.support.services` (make services) holds a pair until Ctrl-C; with a number, the broker is a cluster of
so many private nodes, and the store a Redis Cluster of so many primaries with a replica each (make services NODES=3).
Tests that kill and restart servers use `tests.support.servers` directly.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import click

from tests.support import containers
from tests.support.servers import RabbitMQCluster, RabbitMQServer, RedisCluster, RedisServer, Server, ServerFailed

BROKER_VARIABLE = "KVASIR_TEST_BROKER_URL"
STORE_VARIABLE = "KVASIR_TEST_STORE_URL"


@dataclass(frozen=True, slots=True)
class Pair:
    """Where a broker and a store are."""

    broker_url: str
    store_url: str


@contextlib.contextmanager
def services() -> Iterator[Pair]:
    """A broker and a store for the length of the block."""
    with store() as store_url, broker() as broker_url:
        yield Pair(broker_url, store_url)


def broker() -> AbstractContextManager[str]:
    """The URL of a RabbitMQ for the length of the block. Raises ServerFailed, ProgramMissing."""
    return _service(BROKER_VARIABLE, containers.RABBITMQ_IMAGE, containers.rabbitmq, RabbitMQServer)


def store() -> AbstractContextManager[str]:
    """The URL of a Redis for the length of the block. Raises ServerFailed, ProgramMissing."""
    return _service(STORE_VARIABLE, containers.REDIS_IMAGE, containers.redis, RedisServer)


@contextlib.contextmanager
def _service(
    variable: str, image: str, container: Callable[[], AbstractContextManager[str]], process: Callable[[], Server]
) -> Iterator[str]:
    if url := os.environ.get(variable):
        yield url
        return
    with contextlib.ExitStack() as stack:
        yield _container_url(stack, image, container) or stack.enter_context(process()).url


def _container_url(
    stack: contextlib.ExitStack, image: str, container: Callable[[], AbstractContextManager[str]]
) -> str | None:
    if not containers.available(image):
        return None
    try:
        return stack.enter_context(container())
    except ServerFailed as error:
        click.echo(f"{error}\nA private process takes its place.", err=True)
        return None


@contextlib.contextmanager
def run_clusters(nodes: int) -> Iterator[Pair]:
    """A broker and a store of several private nodes each, for the length of the block."""
    with RedisCluster(nodes, replicas=1) as store, RabbitMQCluster(nodes) as broker:
        yield Pair(broker.url, store.url)


def main() -> int:
    """Hold a pair and say where it is, until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with contextlib.suppress(KeyboardInterrupt), run_clusters(nodes) if nodes > 1 else services() as pair:
        click.echo(f"export KVASIR_BROKER_URL={pair.broker_url}")
        click.echo(f"export KVASIR_STORE_URL={pair.store_url}")
        click.echo("Both stop with Ctrl-C.", err=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())

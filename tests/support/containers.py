"""RabbitMQ and Redis as containers, where a Docker engine answers and has or can get the images."""

import contextlib
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.servers import HOST, ServerFailed, amqp_answers, free_port, redis_answers
from tests.support.waiting import wait_until

RABBITMQ_IMAGE = "rabbitmq:4"
REDIS_IMAGE = "redis:7"
_SOCKETS = ("/var/run/docker.sock", "~/.docker/run/docker.sock", "~/.colima/default/docker.sock")


@cache
def available(image: str) -> bool:
    """Whether a Docker engine answers within 2 s and has the image, or can pull it."""
    client = _client()
    if client is None:
        return False
    with contextlib.closing(client):
        return _has(client, image)


@contextlib.contextmanager
def rabbitmq() -> Iterator[str]:
    """A broker's URL for the length of the block."""
    password = secrets.token_hex(8)
    settings = {"RABBITMQ_DEFAULT_USER": "kvasir", "RABBITMQ_DEFAULT_PASS": password}
    with _container(RABBITMQ_IMAGE, 5672, settings, ["rabbitmq-server"]) as port:
        _await(lambda: amqp_answers(port), RABBITMQ_IMAGE)
        yield f"amqp://kvasir:{password}@{HOST}:{port}/%2F"


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """A Redis URL for the length of the block."""
    password = secrets.token_hex(8)
    url = f"redis://:{password}@{HOST}:{{}}/0"
    options = ["--requirepass", password, "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
    with _container(REDIS_IMAGE, 6379, {}, ["redis-server", *options]) as port:
        _await(lambda: redis_answers(url.format(port)), REDIS_IMAGE)
        yield url.format(port)


def _await(answers: Callable[[], bool], image: str) -> None:
    try:
        wait_until(answers, f"container {image} answers", timeout_s=90)
    except AssertionError as error:
        raise ServerFailed(str(error)) from None


def _client() -> Any:
    host = os.environ.get("DOCKER_HOST", "")
    local = host.startswith("unix://") or any(Path(name).expanduser().exists() for name in _SOCKETS)
    if not local or (host and not host.startswith("unix://")):  # a far engine's loopback ports aren't ours
        return None
    import docker  # a third of a second, and most runs have no engine to ask

    try:
        docker.from_env(timeout=2).close()  # asks for the engine's version
        return docker.from_env(timeout=120)
    except (docker.errors.DockerException, OSError):
        return None


def _has(client: Any, image: str) -> bool:
    import docker

    try:
        if not client.images.list(image):
            client.images.pull(image)
        return True
    except (docker.errors.DockerException, OSError):
        return False


@contextlib.contextmanager
def _container(image: str, port: int, environment: dict[str, str], command: list[str]) -> Iterator[int]:
    """A container with `port` published on a loopback port, which is yielded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # testcontainers' own deprecations
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(image)
    for key, value in environment.items():
        container.with_env(key, value)
    host_port = free_port()
    ports: dict[str, Any] = container.ports
    ports[str(port)] = (HOST, host_port)  # with_bind_ports would publish it on every interface
    container.with_command(command)
    try:
        container.start()
    except Exception as error:  # the library's own, docker's and requests' errors
        raise ServerFailed(f"container {image} did not start: {error}") from error
    try:
        yield host_port
    finally:
        container.stop()

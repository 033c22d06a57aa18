"""A worker's page answers while others hold connections to it: many that say nothing, and one that says little."""

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from monitoring import server
from monitoring.server import Page, PageServer
from tests.support.waiting import wait_until


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    page = Page(CollectorRegistry(), lambda: {"status": "ok"}, list, dict)
    with PageServer(page) as made:
        host, port = made.url.removeprefix("http://").split(":")
        yield host, int(port)


def _healthy(address: tuple[str, int]) -> bool:
    return httpx.get(f"http://{address[0]}:{address[1]}/health", timeout=5).status_code == 200


def _ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_two_hundred_connections_that_say_nothing_take_neither_threads_nor_the_answer(address: tuple[str, int]) -> None:
    before = threading.active_count()
    idle = [socket.create_connection(address) for _ in range(200)]
    try:
        for connection in idle[::2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        assert _healthy(address)
        wait_until(
            lambda: threading.active_count() - before <= 33, "at most 32 are held", 7
        )  # an idle one would end by itself after 10
        assert sum(map(_ended, idle)) >= len(idle) - 32
        assert _healthy(address)
    finally:
        for connection in idle:
            connection.close()


def test_a_request_that_comes_byte_by_byte_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REQUEST_TIMEOUT_S", 0.6)
    with PageServer(Page(CollectorRegistry(), dict, list, dict)) as made:
        host, port = made.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            started = time.monotonic()
            try:
                while time.monotonic() - started < 4:
                    slow.sendall(b"x")
                    time.sleep(0.1)
            except ConnectionError:
                return
    pytest.fail("after 4 s it still reads, one byte after the other")

"""A worker's page answers Prometheus, supervisors and people, on loopback, and outlives bad readers."""

import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from messages.errors import ConfigError
from monitoring.server import Page, PageServer


class Worker:
    """What the page asks about."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def page(self) -> Page:
        health = {"status": "ok", "model": "m", "loaded": True, "backend": "simulated on cpu"}
        return Page(CollectorRegistry(), lambda: health, lambda: self.reasons, lambda: {"busy": 1})


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def server(worker: Worker) -> Iterator[PageServer]:
    with PageServer(worker.page()) as made:
        yield made


def test_it_listens_on_loopback_unless_told_otherwise(server: PageServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")


def test_health_has_the_keys_that_the_old_servers_had(server: PageServer) -> None:
    assert set(httpx.get(f"{server.url}/health").json()) == {"status", "model", "loaded", "backend"}


def test_ready_says_no_with_the_reasons(server: PageServer, worker: Worker) -> None:
    assert httpx.get(f"{server.url}/ready").status_code == 200
    worker.reasons = ["the broker can't be reached"]
    answer = httpx.get(f"{server.url}/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reasons": ["the broker can't be reached"]}


@pytest.mark.parametrize(("path", "status"), [("/metrics", 200), ("/status?x=1", 200), ("/", 404), ("/../etc", 404)])
def test_paths_are_the_four_and_no_others(server: PageServer, path: str, status: int) -> None:
    assert httpx.get(f"{server.url}{path}").status_code == status


def test_a_reader_who_says_nothing_keeps_nobody_waiting(server: PageServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"GET /metr")
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_address_in_use_is_told_in_a_sentence(server: PageServer, worker: Worker) -> None:
    with pytest.raises(ConfigError, match="choose another port"):
        PageServer(worker.page(), port=int(server.url.rpartition(":")[2]))

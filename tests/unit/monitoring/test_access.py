"""Who may speak to what listens: a browser's request has to name this machine, and come from no page of another."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from monitoring.access import HostGuard, is_loopback, why_not
from monitoring.server import Page, PageServer

LAN = "192.168.1.5"


@pytest.mark.parametrize(
    ("listens_on", "host", "origin", "fine"),
    [
        ("127.0.0.1", "localhost:8501", None, True),
        ("127.0.0.1", "127.0.0.1:8501", "http://localhost:3000", True),
        ("127.0.0.1", "[::1]:8501", None, True),
        ("127.0.0.1", "elsewhere.example", None, False),
        ("127.0.0.1", "localhost.elsewhere.example", None, False),
        ("127.0.0.1", "studio1", None, False),
        ("127.0.0.1", LAN, None, False),
        ("127.0.0.1", "localhost", "http://elsewhere.example", False),
        ("127.0.0.1", "localhost", "null", False),
        ("127.0.0.1", "[localhost", None, False),
        ("127.0.0.1", "", None, False),
        ("0.0.0.0", f"{LAN}:9101", None, True),
        ("0.0.0.0", "kvasir-prefill:9101", None, True),
        ("0.0.0.0", "studio1.local:9101", None, True),
        ("0.0.0.0", f"{socket.gethostname()}:9101", None, True),
        ("0.0.0.0", "elsewhere.example", None, False),
        ("0.0.0.0", f"{LAN}:8501", f"http://{LAN}:8501", True),
        ("0.0.0.0", f"{LAN}:8501", "http://elsewhere.example", False),
        ("desk.university.example", "desk.university.example", None, True),
    ],
)
def test_a_name_that_leads_here_is_not_enough(listens_on: str, host: str, origin: str | None, fine: bool) -> None:
    assert (why_not(listens_on, host, origin) == "") == fine


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("a.b", False)]
)
def test_loopback_is_told_from_the_network(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@pytest.mark.parametrize(
    ("kind", "expected"), [("http", ["http.response.start", "http.response.body"]), ("websocket", ["websocket.close"])]
)
def test_an_application_never_sees_what_is_refused(kind: str, expected: list[str]) -> None:
    sent, seen = [], []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def ask() -> None:
        guard = HostGuard(app, "127.0.0.1")
        await guard({"type": kind, "headers": [(b"host", b"elsewhere.example")]}, None, send)  # type: ignore[arg-type]
        await guard({"type": "lifespan"}, None, send)  # type: ignore[arg-type]
        await guard({"type": kind, "headers": [(b"host", b"localhost:8501")]}, None, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert sent == expected
    assert seen == ["lifespan", kind]


@pytest.fixture
def url() -> Iterator[str]:
    with PageServer(Page(CollectorRegistry(), dict, list, dict)) as server:
        yield server.url


@pytest.mark.parametrize("headers", [{"Host": "elsewhere.example"}, {"Origin": "http://elsewhere.example"}])
@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready", "/status"])
def test_a_page_tells_a_page_on_the_web_nothing(url: str, path: str, headers: dict[str, str]) -> None:
    refused = httpx.get(url + path, headers=headers)
    assert refused.status_code == 403
    assert list(refused.json()) == ["error"]


def test_a_probe_that_names_no_host_is_answered(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as probe:
        probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in probe.makefile("rb").readline()

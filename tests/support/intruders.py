"""Attacks on the sockets of running processes: by a page on the web, by somebody without a key, by another user."""

import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.support import sockets

ELSEWHERE = "elsewhere.example"
# What tells something, or does it, in any of the servers: the gateway, a page, the desk, llama.cpp's, vLLM's.
_PATHS = (
    *("/v1/models", "/metrics", "/status", "/api/tags", "/slots", "/props", "/_stcore/health", "/_stcore/host-config"),
    *("/media/x", "/health", "/ready", "/"),
)
_TELL_NOTHING = ("/", "/health", "/ready")  # where everything else wants a key
_PATIENCE_S = 10.0
_AS_NOBODY = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


def doors(pids: Collection[int]) -> set[str]:
    """Each socket of these processes, as `127.0.0.1:8000` or the path of a Unix socket."""
    return {f"{host}:{port}" for host, port in sockets.listening(pids)} | sockets.named(pids)


def ways_in(door: str) -> list[str]:
    """Every attack that got through there, as a sentence; none: it is guarded."""
    return list(_through_a_file(door) if door.startswith(("/", "@")) else _through_a_port(door))


def _through_a_file(door: str) -> Iterator[str]:
    if door.startswith("@"):
        yield f"{door} has no folder: every user can connect"
    elif all(folder.stat().st_mode & 0o001 for folder in Path(door).parents):
        yield f"every user can get to {door}"
    elif os.getuid() == 0 and Path(door).exists():
        tried = subprocess.run([sys.executable, "-I", "-c", _AS_NOBODY, door], capture_output=True, text=True)
        if "PermissionError" not in tried.stderr:
            yield f"another user was not kept from {door}: {tried.stderr[-200:]}"


def _through_a_port(door: str) -> Iterator[str]:
    host, _, port = door.rpartition(":")
    address = (host, int(port))
    wants_key = _status(address, "/v1/models", door) == 401
    if host not in ("127.0.0.1", "::1") and not wants_key:
        yield f"{door} is open to the network without a key"
    for path in _PATHS:
        if wants_key and path in _TELL_NOTHING:
            continue
        for says, request in (
            ("a name that leads here", (ELSEWHERE, None)),
            ("a name that leads here, and its page", (ELSEWHERE, ELSEWHERE)),
            ("a page of another site", (door, ELSEWHERE)),
            ("a page of no site", (door, "null")),
        ):
            status = _status(address, path, *request)
            if status not in (400, 401, 403):
                yield f"{door}{path} answered {status} to {says}"
    for name in (ELSEWHERE, door):
        if _status(address, "/_stcore/stream", name, ELSEWHERE, upgrade=True) == 101:
            yield f"{door} took a WebSocket to {name} from another site"


def _status(
    address: tuple[str, int], path: str, host: str, origin: str | None = None, upgrade: bool = False
) -> int | None:
    """Of a GET; None: nothing that is HTTP answers."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}"]
    if origin:
        lines.append(f"Origin: {origin if origin == 'null' else f'http://{origin}'}")
    if upgrade:
        lines += ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
        lines.append("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    else:
        lines.append("Connection: close")
    try:
        with socket.create_connection(address, timeout=_PATIENCE_S) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            words = connection.makefile("rb").readline().split()
    except OSError:
        return None
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else None

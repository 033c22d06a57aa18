"""What servers of ours that answer in place of real ones have in common: a loopback port, JSON, pieces, bad days."""

import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class FakeServer:
    """A server on a loopback port, until the end of its `with` block. Its `habits` have `hang` and `hangs_up`."""

    handler: type[BaseHTTPRequestHandler]
    habits: Any

    def __init__(self, port: int = 0) -> None:
        """`port`: 0 for any."""
        self.connections: list[socket.socket] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (self.handler,), {"fake": self}))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """Stop listening, drop who is connected. Idempotent."""
        self.habits.hang.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        for connection in self.connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class FakeHandler(BaseHTTPRequestHandler):
    """Answers of such a server."""

    fake: Any
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.fake.connections.append(self.connection)

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):  # the client has cancelled
            return super().handle_one_request()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def body(self) -> Any:
        """What was sent."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def hangs_up(self) -> bool:
        """Whether this request ends without an answer."""
        if self.fake.habits.hangs_up:
            self.fake.habits.hangs_up -= 1
            self.close_connection = True
        return self.close_connection

    def send_json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """All of an answer."""
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_pieces(self, kind: str) -> None:
        """The head of an answer that comes in pieces, the last of them empty."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def send_piece(self, data: bytes) -> None:
        """One of them."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

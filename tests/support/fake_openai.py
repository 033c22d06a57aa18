"""An HTTP server of ours with OpenAI's chat completions, for what real servers do on bad days; no model behind it.

A token is a word. `OpenAIHabits` are what it refuses, forgets or breaks off.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

MODEL = "org/tiny"
KEY = "sk-of-the-tests"


@dataclass
class OpenAIHabits:
    """How this server behaves; a test may change it at any time."""

    key: str = ""  # that it wants
    refuses: tuple[str, ...] = ()  # fields of a request that it does not know
    busy: list[str] = field(default_factory=list)  # Retry-After of the next answers, each a 429; "": without
    fails_with: tuple[int, str] | None = None
    keeps_schemas: bool = True
    tells_usage: bool = True
    event: str = ""  # sent in place of the third event
    ends_after: int = 0  # events after which it says no more
    reason: str = "stop"
    is_stream: bool = True
    context: int | None = 1024
    hangs_up: int = 0  # that many requests end without an answer
    hang: threading.Event = field(default_factory=threading.Event)  # cleared: silent after the first piece

    def __post_init__(self) -> None:
        self.hang.set()


class FakeOpenAI:
    """The server, on a loopback port, until the end of its `with` block."""

    def __init__(self, port: int = 0) -> None:
        """`port`: 0 for any."""
        self.habits = OpenAIHabits()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.connections: list[socket.socket] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_OpenAIHandler,), {"fake": self}))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.habits.hang.set()
        self._http.shutdown()
        self._http.server_close()
        for connection in self.connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _OpenAIHandler(BaseHTTPRequestHandler):
    fake: FakeOpenAI
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.fake.connections.append(self.request)

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):  # the client has cancelled
            return super().handle_one_request()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self._lets_in():
            entry = {"id": MODEL, "object": "model", "max_model_len": self.fake.habits.context}
            self._json(200, {"object": "list", "data": [entry]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        habits = self.fake.habits
        if not self._lets_in():
            return
        self.fake.requests.append(body)
        if self.fake.habits.hangs_up:
            self.fake.habits.hangs_up -= 1
            self.close_connection = True
            return
        if habits.busy:
            wait = habits.busy.pop(0)
            self._refuse(429, "busy", {"Retry-After": wait} if wait else {})
        elif habits.fails_with:
            self._refuse(*habits.fails_with)
        elif unknown_field := next((name for name in habits.refuses if name in body), ""):
            self._refuse(400, f"Unrecognized request argument supplied: {unknown_field}")
        elif not habits.is_stream:
            self._json(200, {"choices": [{"message": {"role": "assistant", "content": "whole"}}]})
        else:
            self._stream(body)

    def _lets_in(self) -> bool:
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.fake.keys.append(key)
        if key == self.fake.habits.key or not self.fake.habits.key:
            return True
        self._refuse(401, f"Incorrect API key provided: {key}")
        return False

    def _stream(self, body: dict[str, Any]) -> None:
        habits = self.fake.habits
        words = [f"word{number} " for number in range(12)]
        if "response_format" in body and habits.keeps_schemas:
            words = ['{"points"', ": ", "3}"]
        reason = "length" if body["max_tokens"] < len(words) else habits.reason
        words = words[: body["max_tokens"]]
        events = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if habits.tells_usage:
            count = sum(len(message["content"].split()) for message in body["messages"])
            events.append({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": len(words)}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, event in enumerate(events):
            if habits.ends_after and number == habits.ends_after:
                break
            self._event(habits.event if habits.event and number == 2 else json.dumps(event))
            habits.hang.wait(20)
        else:
            self._event("[DONE]")
        self._chunk(b"")

    def _event(self, data: str) -> None:
        self._chunk(f": a comment\ndata: {data}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        try:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        except OSError:  # the client has cancelled
            self.close_connection = True

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self._json(status, {"error": {"message": message, "type": "invalid_request_error"}}, headers)

    def _json(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

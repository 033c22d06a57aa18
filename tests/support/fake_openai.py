"""An HTTP server of ours with OpenAI's chat completions, for what real servers do on bad days; no model behind it.

A token is a word. `OpenAIHabits` are what it refuses, forgets or breaks off.
"""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.fake_http import FakeHandler, FakeServer

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


class _OpenAIHandler(FakeHandler, BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self._lets_in():
            entry = {"id": MODEL, "object": "model", "max_model_len": self.fake.habits.context}
            self.send_json(200, {"object": "list", "data": [entry]})

    def do_POST(self) -> None:
        body = self.body()
        habits = self.fake.habits
        if not self._lets_in():
            return
        self.fake.requests.append(body)
        if self.hangs_up():
            return
        if habits.busy:
            wait = habits.busy.pop(0)
            self._refuse(429, "busy", {"Retry-After": wait} if wait else {})
        elif habits.fails_with:
            self._refuse(*habits.fails_with)
        elif unknown_field := next((name for name in habits.refuses if name in body), ""):
            self._refuse(400, f"Unrecognized request argument supplied: {unknown_field}")
        elif not habits.is_stream:
            self.send_json(200, {"choices": [{"message": {"role": "assistant", "content": "whole"}}]})
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
        is_raw = "prompt" in body
        pieces = [{"text": word} if is_raw else {"delta": {"content": word}} for word in words]
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, **piece}]} for piece in pieces]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if habits.tells_usage:
            texts = [body["prompt"]] if is_raw else [message["content"] for message in body["messages"]]
            count = sum(len(text.split()) for text in texts)
            events.append({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": len(words)}})
        self.begin_pieces("text/event-stream")
        for number, event in enumerate(events):
            if habits.ends_after and number == habits.ends_after:
                break
            self._event(habits.event if habits.event and number == 2 else json.dumps(event))
            habits.hang.wait(20)
        else:
            self._event("[DONE]")
        self.send_piece(b"")

    def _event(self, data: str) -> None:
        self.send_piece(f": a comment\ndata: {data}\n\n".encode())

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self.send_json(status, {"error": {"message": message, "type": "invalid_request_error"}}, headers)


class FakeOpenAI(FakeServer):
    """The server, on a loopback port, until the end of its `with` block."""

    handler = _OpenAIHandler

    def __init__(self, port: int = 0) -> None:
        """`port`: 0 for any."""
        self.habits = OpenAIHabits()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        super().__init__(port)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"{super().url}/v1"

"""A reader in place of a model: gives the points that the work says, so that a wrong cell is the way's and not his.

He speaks OpenAI's chat completions, and the openai engine reaches him. The works are those of benchmarks.doors_classes.
"""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.fake_http import FakeHandler, FakeServer

NAME = "reader"
MOST = 19.5  # points of the criterion that he is asked about, in steps of a half
_PART = re.compile(r"part ([a-h]) = (\d+)")


class _Habits:
    """None but to answer when it is time."""

    def __init__(self) -> None:
        self.hang = threading.Event()  # set: nobody waits any more
        self.hangs_up = 0


class _ReaderHandler(FakeHandler, BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_json(200, {"object": "list", "data": [{"id": NAME, "object": "model", "max_model_len": 32_768}]})

    def do_POST(self) -> None:
        body = self.body()
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {})
        text = "\n".join(str(message["content"]) for message in body["messages"])
        start = time.monotonic()
        while (
            _PART.search(text) and time.monotonic() < start + self.fake.seconds and not self.fake.habits.hang.wait(0.1)
        ):
            pass  # he may be told to hurry
        answer = json.dumps(_answer(schema, text)) if schema else "He reads."
        usage = {"prompt_tokens": len(text) // 4, "completion_tokens": len(answer) // 4}
        events: list[Any] = [
            {"choices": [{"index": 0, "delta": {"content": answer}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        self.begin_pieces("text/event-stream")
        for event in (*map(json.dumps, events), "[DONE]"):
            self.send_piece(f"data: {event}\n\n".encode())
        self.send_piece(b"")


def _answer(schema: dict[str, Any], text: str) -> Any:
    """What fits the schema: points by the work, a quote from it, and as little else as possible."""
    if "enum" in schema:
        total = min(sum(int(number) for _, number in _PART.findall(text)), MOST)
        return total if total in schema["enum"] else schema["enum"][0]
    if schema.get("type") == "object":
        return {name: _answer(each, text) if name not in ("evidence", "quote") else _quote(text)
                for name, each in schema.get("properties", {}).items()}  # fmt: skip
    return schema.get("type") == "boolean" or "The parts were added up."


def _quote(text: str) -> str:
    match = _PART.search(text)
    return match[0] if match else ""


class Reader(FakeServer):
    """The server, on a loopback port, until the end of its `with` block."""

    handler = _ReaderHandler

    def __init__(self, seconds: float) -> None:
        """`seconds`: he takes for each question."""
        self.habits = _Habits()
        self.seconds = seconds
        super().__init__()

    @property
    def weights(self) -> str:
        """As the openai engine takes it."""
        return f"{self.url}/v1/{NAME}"

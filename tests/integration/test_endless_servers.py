"""Servers that answer without an end: whoever reads them gives up before it costs anything."""

import json
import time
from collections.abc import Callable
from contextlib import closing, nullcontext

import pytest

from benchmarks.harness import peak_growth
from engines import remote
from engines.llamacpp import http as llamacpp_http
from engines.llamacpp.http import LlamaServer
from engines.ollama.http import OllamaServer
from engines.openai.http import OpenAIServer
from messages.errors import EngineUnavailable
from messages.limits import MAX_REPLY_BYTES, MAX_WAITING_EVENTS
from tests.support.endless import EndlessServer

MOST_MEMORY = 300 << 20
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"more and more "}}]}\n\n'
LINE = json.dumps({"model": "m", "message": {"role": "assistant", "content": "more "}, "done": False}).encode() + b"\n"


@pytest.fixture(autouse=True)
def shorter_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bounded is the same; the test takes seconds less."""
    for module in (remote, llamacpp_http):
        monkeypatch.setattr(module, "MAX_STREAM_BYTES", 16 << 20)


def ask_openai(url: str, what: str) -> None:
    with closing(OpenAIServer(f"{url}/v1", "", allow_external=False)) as server:
        for _ in server.models() if what == "models" else server.chat({"model": "m", "messages": []}):
            pass


def ask_ollama(url: str, what: str) -> None:
    with closing(OllamaServer(url)) as server:
        for _ in server.models() if what == "models" else server.chat(model="m", messages=[]):
            pass


def ask_llama(url: str, what: str) -> None:
    """As both ask that are attached to: llama-server and vLLM."""
    with closing(LlamaServer(url)) as server:
        for _ in server.get("/props") if what == "models" else server.stream("/completion", {}):
            pass


@pytest.mark.parametrize(
    ("ask", "what", "endless"),
    [
        (ask_openai, "models", ("application/json", b"[")),
        (ask_openai, "models", ("application/json", b"x", 500)),
        (ask_openai, "chat", ("application/json", b"x", 500)),
        (ask_openai, "chat", ("text/event-stream", b"data: {")),
        (ask_openai, "chat", ("text/event-stream", b": nothing yet\n\n")),
        (ask_openai, "chat", ("text/event-stream", EVENT)),
        (ask_openai, "chat", ("text/event-stream", b"data: [DONE]\n\n")),
        (ask_ollama, "models", ("application/json", b"[")),
        (ask_ollama, "models", ("application/json", b"x", 500)),
        (ask_ollama, "chat", ("application/x-ndjson", b"x", 500)),
        (ask_ollama, "chat", ("application/x-ndjson", b"x")),
        (ask_ollama, "chat", ("application/x-ndjson", LINE)),
        (ask_ollama, "models", ("application/json", b"x", 200, "Content-Encoding: gzip\r\n")),
        (ask_llama, "models", ("application/json", b"[")),
        (ask_llama, "models", ("application/json", b"[],")),
        (ask_llama, "models", ("application/json", b"x", 500)),
        (ask_llama, "chat", ("application/json", b"[", 500)),
        (ask_llama, "chat", ("text/event-stream", b"data: {")),
        (ask_llama, "chat", ("text/event-stream", b": nothing yet\n\n")),
        (ask_llama, "chat", ("text/event-stream", EVENT)),
    ],
)
def test_what_has_no_end_is_given_up(ask: Callable[[str, str], None], what: str, endless: tuple[str, bytes]) -> None:
    with EndlessServer(*endless) as server:

        def try_it() -> None:
            is_answered = endless[1].startswith(b"data: [DONE]")
            with nullcontext() if is_answered else pytest.raises(EngineUnavailable):
                ask(server.url, what)

        start = time.monotonic()
        grown = peak_growth(try_it)
        assert time.monotonic() - start < 20
        assert server.sent < 64 << 20
        assert (grown or 0) < MOST_MEMORY


@pytest.mark.parametrize("status", [200, 500])
def test_json_that_nests_too_deep_is_an_answer_that_is_not_understood(status: int) -> None:
    with (
        EndlessServer("application/json", b"[", status, "Content-Length: 1000000\r\n") as deep,
        closing(LlamaServer(deep.url)) as server,
        pytest.raises(EngineUnavailable, match=r"answered .*\[\[\["),
    ):
        server.get("/props")


def test_a_server_that_is_faster_than_its_reader_waits() -> None:
    with (
        EndlessServer("text/event-stream", EVENT) as endless,
        closing(OpenAIServer(f"{endless.url}/v1", "", allow_external=False)) as server,
    ):
        events = server.chat({"model": "m", "messages": []})
        next(events)
        time.sleep(1)
        assert endless.sent < MAX_REPLY_BYTES + 4 * MAX_WAITING_EVENTS * len(EVENT) + (8 << 20)  # buffers on the way
        events.close()  # type: ignore[attr-defined]

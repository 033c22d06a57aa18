"""An Ollama server of ours, for the real client: its routes, its field names, its errors, and no model behind them.

A token is a word. Shapes and sentences are those of Ollama 0.33; `OllamaHabits` are what other releases do.
"""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.fake_http import FakeHandler, FakeServer

MODEL = "qwen3-coder:30b"
TRAINED_CONTEXT = 4096
TEMPLATE_TOKENS = 9  # what the chat template adds to a message
_MODIFIED_AT = "2026-03-02T08:00:00.000000Z"
_PARAMETERS = 'repeat_penalty                 1.05\nstop                           "<|im_end|>"\ntop_k            20'


@dataclass
class OllamaHabits:
    """How this server behaves; a test may change it at any time."""

    knows_truncate: bool = True  # releases before 0.12.6 cut a prompt that is too long, and answer
    cuts_to_half: bool = False  # and later ones, unless told otherwise, to half the context
    drops_messages: bool = False  # before that, whole messages from the front, but the last one (server/prompt.go)
    keeps_schemas: bool = True
    loads_context: int = 0  # 0: what was asked for
    size_vram: int = 18_000_000_000
    vocabulary: tuple[tuple[str, int], ...] = ()  # text and GGUF's type of each token; (): an old server tells nothing
    template: str = "{{ .Prompt }}"
    modelfile: str = ""
    fails_with: tuple[int, str] | None = None
    done_reason: str = ""
    hangs_up: int = 0  # that many requests end without an answer
    hang: threading.Event = field(default_factory=threading.Event)  # cleared: a chat stops after its first piece

    def __post_init__(self) -> None:
        self.hang.set()


class _RequestRefused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _OllamaHandler(FakeHandler, BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/api/tags":
            self.send_json(200, {"models": [{"model": name, "name": name} for name in sorted(self.fake.models)]})
        elif self.path == "/api/ps":
            self.send_json(200, {"models": self._list_running()})
        else:
            self.send_json(404, {"error": "page not found"})

    def do_POST(self) -> None:
        body = self.body()
        self.fake.requests.append((self.path, body))
        if self.hangs_up():
            return
        try:
            if body["model"] not in self.fake.models:
                raise _RequestRefused(404, f"model '{body['model']}' not found")
            {"/api/show": self._show, "/api/generate": self._generate, "/api/chat": self._chat}[self.path](body)
        except _RequestRefused as refusal:
            self.send_json(refusal.status, {"error": str(refusal)})

    def _list_running(self) -> list[dict[str, Any]]:
        if not self.fake.context:
            return []
        sizes = {"size": 18_000_000_000, "size_vram": self.fake.habits.size_vram}
        return [{"model": MODEL, "name": MODEL, "context_length": self.fake.context, **sizes}]

    def _show(self, body: dict[str, Any]) -> None:
        info: dict[str, Any] = {"general.architecture": "qwen3moe", "qwen3moe.context_length": TRAINED_CONTEXT}
        if self.fake.habits.vocabulary:
            columns = zip(*self.fake.habits.vocabulary, strict=True) if body.get("verbose") else (None, None)
            info |= dict(zip(("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"), columns, strict=True))
        reply = {"template": self.fake.habits.template, "modelfile": self.fake.habits.modelfile}
        self.send_json(200, {"model_info": info, "parameters": _PARAMETERS, **reply})

    def _generate(self, body: dict[str, Any]) -> None:
        self._load(body)
        if body["stream"]:
            return self._stream(*self._words(body), len(body["prompt"].split()), "response")
        counts = {"prompt_eval_count": len(body["prompt"].split()), "eval_count": 1, "done_reason": "length"}
        self.send_json(200, {"model": MODEL, "created_at": _MODIFIED_AT, "response": "a", "done": True, **counts})

    def _chat(self, body: dict[str, Any]) -> None:
        habits = self.fake.habits
        if habits.fails_with:
            raise _RequestRefused(*habits.fails_with)
        if isinstance(body.get("format"), dict) and body["format"].get("type") == "nonsense":
            raise _RequestRefused(
                400, '{"error":{"code":400,"message":"JSON schema conversion failed: Unrecognized schema"}}'
            )
        self._load(body)
        count, cut = self._count(body), 0
        if count > self.fake.context:
            cut = self._cut(body, count)
        words, reason = self._words(body)
        self._stream(words, habits.done_reason or reason, cut or count)

    def _load(self, body: dict[str, Any]) -> None:
        self.fake.context = min(TRAINED_CONTEXT, self.fake.habits.loads_context or body["options"]["num_ctx"])

    def _count(self, body: dict[str, Any]) -> int:
        return TEMPLATE_TOKENS + sum(len(message.get("content", "").split()) for message in body["messages"])

    def _cut(self, body: dict[str, Any], count: int) -> int:
        context, habits = self.fake.context, self.fake.habits
        if habits.knows_truncate and body.get("truncate") is False:
            message = (
                f"request ({count} tokens) exceeds the available context size ({context} tokens), try increasing it"
            )
            detail = {"code": 400, "message": message, "type": "exceed_context_size_error"}
            raise _RequestRefused(400, json.dumps({"error": detail}))
        if habits.drops_messages:
            messages = list(body["messages"])
            while messages[1:] and count > context:
                messages.pop(0)
                count = self._count({"messages": messages})
        if count <= context:
            return count
        return context // 2 + 2 if habits.cuts_to_half else context

    def _words(self, body: dict[str, Any]) -> tuple[list[str], str]:
        """The answer's tokens: JSON under a schema, else the options as this server understood them."""
        if body.get("format") and self.fake.habits.keeps_schemas:
            return ['{"points"', ": ", "3}"], "stop"
        limit = body["options"]["num_predict"]
        words = [f"word{number} " for number in range(12)]
        return words[:limit], "length" if limit < len(words) else "stop"

    def _stream(self, words: list[str], reason: str, count: int, field: str = "message") -> None:
        def content(text: str) -> dict[str, Any]:
            return {field: {"role": "assistant", "content": text} if field == "message" else text}

        self.begin_pieces("application/x-ndjson")
        for word in words:
            self._line({**content(word), "done": False})
            self.fake.habits.hang.wait(20)
        counts = {"prompt_eval_count": count, "eval_count": len(words), "total_duration": 5_000_000}
        end = {**content(""), "done": True, "done_reason": reason, **counts}
        self._line(end)
        self.send_piece(b"")

    def _line(self, event: dict[str, Any]) -> None:
        self.send_piece(json.dumps({"model": MODEL, "created_at": _MODIFIED_AT, **event}).encode() + b"\n")


class FakeOllama(FakeServer):
    """The server, on a loopback port, until the end of its `with` block."""

    handler = _OllamaHandler

    def __init__(self, port: int = 0) -> None:
        """`port`: 0 for any."""
        self.habits = OllamaHabits()
        self.models = {MODEL}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.context = 0  # of the model as loaded; 0: it isn't
        super().__init__(port)

    def last_request(self, path: str) -> dict[str, Any]:
        """The last request to a route."""
        return next(body for route, body in reversed(self.requests) if route == path)

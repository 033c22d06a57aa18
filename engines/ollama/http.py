"""Talks to an Ollama server through Ollama's own client."""

import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import ollama

from engines.remote import CONNECT_S, IDLE_S, RemoteServer, bounded
from messages.errors import ContextExceeded, EngineUnavailable, InvalidSchema, KvasirError

_NOT_FOUND = 404
_UNCUT = {"truncate": False, "shift": False}
_EXTRA_FIELDS = {"chat": _UNCUT, "generate": _UNCUT, "show": {"verbose": True}}
# Words in error messages of Ollama and its llama-server. _TOO_LONG is for a prompt that does not fit, and _NO_SCHEMA is
# for an invalid schema.
_TOO_LONG = ("exceed_context_size", "exceeds the context", "exceeds the available context", "longer than the context")
_NO_SCHEMA = ("grammar", "schema", "invalid format")


class ModelMissing(EngineUnavailable):
    """The server does not have the model."""


class OllamaServer(RemoteServer):
    """One Ollama server. All methods may be called from any thread.

    They raise EngineUnavailable (ModelMissing among them), ContextExceeded, InvalidSchema; and Cancelled soon after
    `stop` is set.
    """

    disconnect_errors = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

    def __init__(self, host: str) -> None:
        """`host` is a URL. "" means the server in OLLAMA_HOST, otherwise this machine's."""
        # There is no read time-out, because the server is silent for minutes while it loads a model or computes a long
        # prompt. The caller's stop event ends the wait.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=IDLE_S)
        transport = _NeverCut(limits=limits, trust_env=False)
        self._client = ollama.AsyncClient(host or None, timeout=timeout, transport=transport)
        self.host = host or "this machine"
        super().__init__("ollama")

    def models(self) -> list[str]:
        """Names of the models that were pulled."""
        return sorted(str(entry.model) for entry in self._call(self._client.list).models)

    def show(self, model: str) -> ollama.ShowResponse:
        """The server's description of a model."""
        description: ollama.ShowResponse = self._call(lambda: self._client.show(model))
        return description

    def models_in_memory(self) -> list[ollama.ProcessResponse.Model]:
        """The models in memory."""
        return list(self._call(self._client.ps).models)

    def generate(self, **request: Any) -> ollama.GenerateResponse:
        """A complete answer. `request` has the arguments of the client's `generate`."""
        answer: ollama.GenerateResponse = self._call(lambda: self._client.generate(**request))
        return answer

    def chat(self, stop: threading.Event | None = None, **request: Any) -> Iterator[ollama.ChatResponse]:
        """An answer piece by piece. `request` has the arguments of the client's `chat`, or with a `prompt` those of its
        `generate`."""
        return self._receive(lambda: self._pieces(request), stop)

    async def _pieces(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        ask = self._client.generate if "prompt" in request else self._client.chat
        async for piece in await ask(stream=True, **request):
            yield piece if isinstance(piece, ollama.ChatResponse) else _as_chat(piece)

    def _translate_error(self, error: BaseException) -> KvasirError:
        if not isinstance(error, ollama.ResponseError):
            reason = str(error) or type(error).__name__
            return EngineUnavailable(f"the Ollama server at {self.host} does not answer: {reason:.300}")
        message = error.error.strip()
        if any(words in message for words in _TOO_LONG):
            return ContextExceeded(f"Ollama refused the prompt: {message:.300}")
        if any(word in message.lower() for word in _NO_SCHEMA):
            return InvalidSchema(f"the JSON schema can't be made a constraint: {message:.300}")
        if error.status_code == _NOT_FOUND:
            return ModelMissing(f"Ollama at {self.host}: {message:.300}")
        return EngineUnavailable(f"Ollama at {self.host} answered {error.status_code}: {message:.300}")

    def _is_gone(self, error: BaseException) -> bool:
        # ConnectionError is raised by Ollama's client itself.
        return isinstance(error, (httpx.TransportError, ConnectionError))

    async def _probe(self) -> Any:
        await self._client.ps()

    async def _close_client(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]


def _as_chat(piece: ollama.GenerateResponse) -> ollama.ChatResponse:
    message = ollama.Message(role="assistant", content=piece.response)
    figures = piece.model_dump(include=set(ollama.ChatResponse.model_fields) - {"message", "logprobs"})
    return ollama.ChatResponse(message=message, **figures)


class _NeverCut(httpx.AsyncHTTPTransport):
    """Adds fields that the client (0.6) doesn't know. Without them the server drops the middle of a prompt that doesn't
    fit, or the beginning of one whose answer grows too long, and still answers with status 200; and `show` doesn't
    include the model's vocabulary."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        extra_fields = _EXTRA_FIELDS.get(request.url.path.rpartition("/api/")[2])
        if extra_fields:
            body = json.loads(request.content) | extra_fields
            request = httpx.Request(
                request.method,
                request.url,
                headers={name: value for name, value in request.headers.items() if name != "content-length"},
                json=body,
                extensions=request.extensions,
            )
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise EngineUnavailable(
                "Ollama compressed its answer, although Kvasir asked for an answer without compression"
            )
        by_lines = "ndjson" in response.headers.get("content-type", "")
        response.stream = _Bounded(response.stream, by_lines)
        return response


class _Bounded(httpx.AsyncByteStream):
    """A response body that raises an error when it is longer than any answer may be."""

    def __init__(self, stream: Any, by_lines: bool) -> None:
        self._stream = stream
        self._by_lines = by_lines

    def __aiter__(self) -> AsyncIterator[bytes]:
        return bounded(aiter(self._stream), "Ollama", self._by_lines)

    async def aclose(self) -> None:
        """See httpx."""
        await self._stream.aclose()

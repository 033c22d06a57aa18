"""Speaks with an Ollama server through its own client: requests that can be called off while the server computes.

The client's requests run on one event loop in a thread of its own; the caller waits for what comes back, looks at its
stop event, and cancels. The closed connection tells the server.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import ollama

from messages.errors import Cancelled, ContextExceeded, EngineUnavailable, InvalidSchema, KvasirError

_POLL_S = 0.1
_CONNECT_S = 10.0
_NOT_FOUND = 404
_MORE = {"chat": {"truncate": False, "shift": False}, "show": {"verbose": True}}
# What Ollama and the llama-server below it say of a prompt that does not fit, and of a schema that is none.
_TOO_LONG = ("exceed_context_size", "exceeds the context", "exceeds the available context", "longer than the context")
_NO_SCHEMA = ("grammar", "schema", "invalid format")


class ModelMissing(EngineUnavailable):
    """The server does not have the model."""


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class OllamaServer:
    """One Ollama server. All methods may be called from any thread.

    They raise EngineUnavailable (ModelMissing among them), ContextExceeded, InvalidSchema; and Cancelled soon after
    `stop` is set.
    """

    def __init__(self, host: str) -> None:
        """`host` is a URL, or "" for what OLLAMA_HOST says, else this machine."""
        # No read time-out: loading and a long prompt are silent for minutes; the caller's stop event ends them.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        transport = _NeverCut(limits=httpx.Limits(max_connections=None, max_keepalive_connections=32), trust_env=False)
        self._client = ollama.AsyncClient(host or None, timeout=timeout, transport=transport)
        self.host = host or "this machine"
        self._closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ollama-http", daemon=True)
        self._thread.start()

    def models(self) -> list[str]:
        """Names of the models that were pulled."""
        return sorted(str(entry.model) for entry in self._only(self._client.list).models)

    def show(self, model: str) -> ollama.ShowResponse:
        """What the server knows of a model."""
        shown: ollama.ShowResponse = self._only(lambda: self._client.show(model))
        return shown

    def loaded(self) -> list[ollama.ProcessResponse.Model]:
        """The models in memory."""
        return list(self._only(self._client.ps).models)

    def generate(self, **request: Any) -> ollama.GenerateResponse:
        """An answer at once; `request` as for the client's `generate`."""
        answer: ollama.GenerateResponse = self._only(lambda: self._client.generate(**request))
        return answer

    def chat(self, stop: threading.Event | None = None, **request: Any) -> Iterator[ollama.ChatResponse]:
        """An answer piece by piece; `request` as for the client's `chat`."""
        return self._receive(lambda: self._pieces(request), stop)

    def close(self) -> None:
        """Requests in progress raise EngineUnavailable. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut_down(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()  # type: ignore[no-untyped-call]
        await self._loop.shutdown_asyncgens()

    async def _pieces(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        async for piece in await self._client.chat(stream=True, **request):
            yield piece

    def _only(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        async def once() -> AsyncIterator[Any]:
            yield await ask()

        with closing(self._receive(once, None)) as items:
            return next(items)

    def _receive(
        self, produce: Callable[[], AsyncIterator[Any]], stop: threading.Event | None
    ) -> Generator[Any, None, None]:
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._check_running(stop)
        task = asyncio.run_coroutine_threadsafe(_deliver(produce(), inbox.put), self._loop)
        try:
            while True:
                try:
                    item = inbox.get(timeout=_POLL_S)
                except queue.Empty:
                    self._check_running(stop)
                    continue
                self._check_running(stop)
                if not isinstance(item, _End):
                    yield item
                elif item.error is None:
                    return
                else:
                    raise _sorted_out(item.error, self.host) from item.error
        finally:
            task.cancel()

    def _check_running(self, stop: threading.Event | None) -> None:
        if self._closed.is_set():
            raise EngineUnavailable("the ollama engine was closed")
        if stop is not None and stop.is_set():
            raise Cancelled("cancelled while the engine was at work")


class _NeverCut(httpx.AsyncHTTPTransport):
    """Adds fields that the client (0.6) doesn't know. By default the server drops the middle of a prompt that doesn't
    fit, and the beginning of one that its answer outgrows, and answers with status 200; and `show` keeps the model's
    vocabulary to itself."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        more = _MORE.get(request.url.path.rpartition("/api/")[2])
        if more:
            body = json.loads(request.content) | more
            headers = {name: value for name, value in request.headers.items() if name != "content-length"}
            extensions = request.extensions
            request = httpx.Request(request.method, request.url, headers=headers, json=body, extensions=extensions)
        return await super().handle_async_request(request)


async def _deliver(items: AsyncIterator[Any], put: Callable[[Any], None]) -> None:
    try:
        async for item in items:
            put(item)
    except BaseException as error:
        put(_End(error))
        if isinstance(error, asyncio.CancelledError):
            raise
    else:
        put(_End(None))


def _sorted_out(error: BaseException, host: str) -> KvasirError:
    """What a failed request means for the job."""
    if not isinstance(error, ollama.ResponseError):
        what = str(error) or type(error).__name__
        return EngineUnavailable(f"the Ollama server at {host} does not answer: {what:.300}")
    said = error.error.strip()
    if any(words in said for words in _TOO_LONG):
        return ContextExceeded(f"Ollama refused the prompt: {said:.300}")
    if any(word in said.lower() for word in _NO_SCHEMA):
        return InvalidSchema(f"the JSON schema can't be made a constraint: {said:.300}")
    if error.status_code == _NOT_FOUND:
        return ModelMissing(f"Ollama at {host}: {said:.300}")
    return EngineUnavailable(f"Ollama at {host} answered {error.status_code}: {said:.300}")

"""Speaks HTTP with a llama.cpp server: requests that can be called off while the server computes.

A blocking read can't be interrupted from outside, so the requests run on one event loop in a thread of its own;
the caller waits for what comes back, looks at its stop event, and cancels. The closed connection tells the server.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx

from messages.errors import Cancelled, EngineUnavailable

_POLL_S = 0.1
_CONNECT_S = 10.0
_ANSWER_S = 30.0  # for questions that need no computing


class ServerRefused(EngineUnavailable):
    """The server answered with an error; `kind` is its own name for it."""

    def __init__(self, message: str, status: int, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class LlamaServer:
    """The HTTP side of one server. All methods may be called from any thread, and raise EngineUnavailable."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llamacpp-http", daemon=True)
        self._thread.start()
        # No read time-out: a long prefill is silent for minutes, and the caller's stop event is what ends it.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)

    def get(self, path: str) -> Any:
        """The JSON that the server answers."""
        return self._only(lambda: self._once("GET", path, None), None)

    def post(self, path: str, body: dict[str, Any], stop: threading.Event | None = None) -> Any:
        """The JSON that the server answers. Raises Cancelled soon after `stop` is set."""
        return self._only(lambda: self._once("POST", path, body), stop)

    def stream(self, path: str, body: dict[str, Any], stop: threading.Event | None = None) -> Iterator[Any]:
        """The server-sent events, each as its JSON. Raises Cancelled soon after `stop` is set."""
        return self._receive(lambda: self._events(path, body), stop)

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
        await self._client.aclose()
        await self._loop.shutdown_asyncgens()

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[Any]:
        timeout = httpx.Timeout(_ANSWER_S) if method == "GET" else httpx.USE_CLIENT_DEFAULT
        response = await self._client.request(method, path, json=body, timeout=timeout)
        _check(response, response.content)
        yield _json(response.content)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        async with self._client.stream("POST", path, json=body) as response:
            if response.is_error:
                _check(response, await response.aread())
            async for line in response.aiter_lines():
                kind, _, value = line.partition(": ")
                if kind == "error":
                    raise _refusal(500, value.encode())
                if kind == "data":
                    yield _json(value.encode())

    def _only(self, produce: Callable[[], AsyncIterator[Any]], stop: threading.Event | None) -> Any:
        with closing(self._receive(produce, stop)) as items:
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
                if isinstance(item, _End):
                    self._finish(item)
                    return
                yield item
        finally:
            task.cancel()

    def _finish(self, end: _End) -> None:
        if isinstance(end.error, EngineUnavailable):
            raise end.error
        if end.error is not None:
            what = str(end.error) or type(end.error).__name__
            raise EngineUnavailable(f"the llama.cpp server at {self.url} does not answer: {what}") from end.error

    def _check_running(self, stop: threading.Event | None) -> None:
        if self._closed.is_set():
            raise EngineUnavailable("the llama.cpp engine was closed")
        if stop is not None and stop.is_set():
            raise Cancelled("cancelled while the engine was at work")


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


def _check(response: httpx.Response, body: bytes) -> None:
    if response.is_error:
        raise _refusal(response.status_code, body)


def _refusal(status: int, body: bytes) -> ServerRefused:
    try:
        error = json.loads(body)
        error = error.get("error", error)
        message, kind = str(error["message"]), str(error.get("type", ""))
    except (ValueError, KeyError, AttributeError, TypeError):
        message, kind = body[:200].decode("utf-8", "replace"), ""
    return ServerRefused(f"the llama.cpp server answered {status}: {message}", status, kind)


def _json(body: bytes) -> Any:
    try:
        value = json.loads(body)
    except ValueError:
        raise EngineUnavailable(f"the llama.cpp server answered something other than JSON: {body[:80]!r}") from None
    if isinstance(value, dict) and "error" in value:
        raise _refusal(500, body)
    return value

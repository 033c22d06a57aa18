"""Every request passes here first.

The guard checks the key, and limits size, time and the number of requests at once.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.gateway import Gateway
from gateway.refusal import ApiError
from messages import limits
from monitoring import access

BODY_S = 30.0
UPLOAD_S = 600.0
_UPLOAD = ("POST", "/v1/files")
_OPEN_TO_ALL = ("/", "/health", "/ready", "/docs", "/openapi.json")

Take = Callable[[int], None]


class Guard:
    """ASGI middleware. It puts the request's key into `scope["state"]["key"]`, or None where no key is needed.

    A client without a key can't use up resources: the routes open to all read no body, and don't count as requests
    under way.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._places = Places(gateway.figures.open.set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        send, state = self._counting(send), scope.setdefault("state", {})
        if scope["method"] == "HEAD" and not scope["path"].startswith("/api/"):
            scope = {**scope, "method": "GET"}  # a HEAD request is handled like a GET request; uvicorn omits the body
        with ExitStack() as until_over:
            try:
                key = state["key"] = self._admit(scope)
                if scope["path"] in _OPEN_TO_ALL:
                    return await self._app(scope, _replay_body(b"", receive), send)
                is_upload = (scope["method"], scope["path"]) == _UPLOAD
                take = until_over.enter_context(self._places.one(key.name if key else "", is_upload))
            except ApiError as refusal:
                return await refusal.response(scope["path"])(scope, receive, send)
            state["has_place"] = True
            await self._pass(scope, receive, send, take, is_upload)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, take: Take, is_upload: bool) -> None:
        try:
            if is_upload:
                too_long = ApiError(
                    413, f"the file is longer than {limits.MAX_FILE_BYTES >> 20} MiB", "file", "body_too_large"
                )
                return await self._app(
                    scope, _limit_size(scope, receive, limits.MAX_UPLOAD_BYTES, too_long, take), send
                )
            too_long = ApiError(
                413, f"the body is longer than {limits.MAX_BODY_BYTES >> 20} MiB", code="body_too_large"
            )
            async with asyncio.timeout(BODY_S):
                body = await Request(scope, _limit_size(scope, receive, limits.MAX_BODY_BYTES, too_long, take)).body()
        except ClientDisconnect:
            return
        except (ApiError, TimeoutError) as error:
            refusal = error if isinstance(error, ApiError) else ApiError(408, f"the body took longer than {BODY_S:g} s")
            return await refusal.response(scope["path"])(scope, receive, send)
        if body:  # by default, curl sends JSON with the content type of a form, and Ollama's examples do the same
            other_headers = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope["headers"] = [*other_headers, (b"content-type", b"application/json")]
        await self._app(scope, _replay_body(body, receive), send)

    def _admit(self, scope: Scope) -> Any:
        headers, path = Headers(scope=scope), scope["path"]
        if not self._gateway.keys.is_required:
            _check_local(headers, self._gateway.host_names)
        if _header_bytes(scope) > limits.MAX_HEADER_BYTES:
            raise ApiError(
                431, f"the headers are longer than {limits.MAX_HEADER_BYTES >> 10} KiB", code="headers_too_large"
            )
        if path in _OPEN_TO_ALL or not self._gateway.keys.is_required:
            return None
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        key = self._gateway.keys.find(secret.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise ApiError(401, "an API key is needed, as 'Authorization: Bearer KEY'", code="invalid_api_key")
        return key

    def _counting(self, send: Send) -> Send:
        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._gateway.figures.requests.labels(str(message["status"])).inc()
                MutableHeaders(scope=message)["x-request-id"] = f"req_{secrets.token_hex(12)}"
            await send(message)

        return count_and_send


def _header_bytes(scope: Scope) -> int:
    """Return the size of the headers as received, within a few bytes a line.

    h11 limits only headers that are incomplete; headers that arrive in one large piece pass its limit.
    """
    return (
        len(scope["raw_path"])
        + len(scope["query_string"])
        + sum(len(name) + len(value) for name, value in scope["headers"])
    )


def _check_local(headers: Headers, names: Collection[str]) -> None:
    """Refuse requests from web pages.

    Without keys, a page opened in a browser on this machine could use the gateway.
    """
    if problem := access.why_not(access.LOOPBACK, headers.get("host", ""), headers.get("origin"), names):
        raise ApiError(403, f"the gateway has no API keys, so {problem}: add a key with kvasir keys add")


def _limit_size(scope: Scope, receive: Receive, limit: int, too_long: ApiError, take: Take) -> Receive:
    """Pass on the body as it arrives. Raises `too_long` when its declared or received length is more than `limit`."""
    if int(Headers(scope=scope).get("content-length", "0")) > limit:
        raise too_long
    size = 0

    async def receive_within_limit() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise too_long
        take(len(message.get("body", b"")))
        return message

    return receive_within_limit


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body in one piece, and later messages after it."""
    pending: list[Callable[[], Message]] = [lambda: {"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop()() if pending else await receive()

    return replay


class Places:
    """Counts requests and bytes by key. Without keys all requests have the same name, so one key's limits apply to all.

    Must be used in the event loop.
    """

    def __init__(self, on_change: Callable[[int], None]) -> None:
        """`on_change` is called with the number of requests under way."""
        self._on_change = on_change
        self._requests: Counter[str] = Counter()
        self._body_bytes: Counter[str] = Counter()
        self._file_bytes: Counter[str] = Counter()  # bytes of the uploads under way

    @contextmanager
    def one(self, key: str, is_upload: bool) -> Iterator[Take]:
        """Hold a place for a request, and yield a function to call with the size of each piece of its body.

        Both raise ApiError if a limit is reached.
        """
        taken, counts, bounds = 0, self._body_bytes, (limits.MAX_BODIES_BYTES_PER_KEY, limits.MAX_BODIES_BYTES)
        if is_upload:
            counts, bounds = self._file_bytes, (limits.MAX_UPLOADS_BYTES_PER_KEY, limits.MAX_UPLOADS_BYTES)

        def take(size: int) -> None:
            nonlocal taken
            taken += size
            counts[key] += size
            _require_room(counts, key, bounds, f"bytes of {'files' if is_upload else 'requests'}")

        self._requests[key] += 1
        try:
            _require_room(self._requests, key, (limits.MAX_OPEN_PER_KEY, limits.MAX_OPEN), "requests")
            self._on_change(self._requests.total())
            yield take
        finally:
            self._requests[key] -= 1
            counts[key] -= taken
            self._on_change(self._requests.total())


def _require_room(counts: Counter[str], key: str, bounds: tuple[int, int], words: str) -> None:
    for number, most in zip((counts[key], counts.total()), bounds, strict=True):
        if number > most:
            raise ApiError(
                429, f"{most:,} {words} are already under way: try again later", code="too_many_requests", retry_s=1
            )

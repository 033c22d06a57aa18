"""Talks to a server with OpenAI's chat completions API."""

import asyncio
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import certifi

from engines.remote import CONNECT_S, IDLE_S, RemoteServer, bounded
from messages import bounded_json
from messages.errors import ContextExceeded, EngineUnavailable, InvalidPrompt, InvalidSchema, KvasirError

_log = logging.getLogger(__name__)

_END_S = 0.5  # after its last event, a stream must end within this time
_LONGEST_WAIT_S = 600.0  # if a server asks Kvasir to wait for more seconds than this, it counts as unavailable
_TOO_LONG = ("context length", "context size", "context_length", "maximum context", "too long", "a context of")
_NO_SCHEMA = ("grammar", "schema", "response_format")
_PERMANENT_STATUSES = (400, 413, 422)
_UNAVAILABLE_STATUSES = (502, 503, 504)  # from a proxy whose server is unavailable, or from a server that is loading

# Prompts can go to these networks (this machine and private networks) even without allow_external = true.
_INSIDE = [
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "0.0.0.0/32"),
        *("::1/128", "fc00::/7", "fe80::/10", "::/128"),
    )
]
_INSIDE_NAMES = (".local", ".localhost", ".internal", ".home.arpa")


class RequestRefused(EngineUnavailable):
    """The server answered with an error; `message` is its sentence, and `param` the field that it names."""

    def __init__(self, host: str, status: int, message: str, param: str = "") -> None:
        super().__init__(f"the server at {host} answered {status}: {message:.300}")
        self.status = status
        self.message = message
        self.param = param


class NoModelList(EngineUnavailable):
    """The server answered, but lists no models. mlx_lm.server does this on a machine without a hub cache."""


class Outside(EngineUnavailable):
    """The server is outside private networks, and allow_external is not set."""


class _Busy(Exception):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class OpenAIServer(RemoteServer):
    """One server. All methods may be called from any thread.

    They raise EngineUnavailable (RequestRefused and Outside among them), ContextExceeded, InvalidPrompt, InvalidSchema;
    and Cancelled soon after `stop` is set.
    """

    disconnect_errors = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)

    def __init__(self, base: str, api_key: str, allow_external: bool) -> None:
        """`base` is the URL up to and including `/v1`. The key is sent only there, and never shown."""
        self.host = base
        self._key = api_key
        self._may_be_called = allow_external or (is_fixed_address(base) and not outside(base))
        self._session: aiohttp.ClientSession | None = None
        super().__init__("openai")

    def models(self) -> list[dict[str, Any]]:
        """The server's list under /models."""
        return [entry for entry in self._call(self._probe) if isinstance(entry, dict)]

    def chat(self, body: dict[str, Any], stop: threading.Event | None = None) -> Iterator[dict[str, Any]]:
        """The events of an answer. A `prompt` in place of `messages` is continued as it stands.

        If the server is busy (429), it is asked again after the time that it states.
        """
        return self._receive(lambda: self._events_with_retry(body), stop)

    async def _probe(self) -> list[Any]:
        await self._check_place()
        async with self._open_session().get(f"{self.host}/models", allow_redirects=False) as response:
            body = await self._read(response)
        self._check(response, body)
        try:
            entries = bounded_json.loads(body)["data"]
        except (ValueError, RecursionError, KeyError, TypeError):
            entries = None
        if not isinstance(entries, list):
            raise NoModelList(f"{self.host}/models is not a list of models: check that the address offers OpenAI's API")
        return entries

    async def _events_with_retry(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        while True:
            try:
                async for event in self._events(body):
                    yield event
                return
            except _Busy as busy:
                _log.info("the server at %s is busy, and is asked again in %.0f s", self.host, busy.seconds)
                await asyncio.sleep(busy.seconds)

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        await self._check_place()
        route = "completions" if "prompt" in body else "chat/completions"
        post = self._open_session().post(f"{self.host}/{route}", json=body, allow_redirects=False)
        async with post as response:
            if response.status != HTTPStatus.OK:
                self._check(response, await self._read(response))
            if "event-stream" not in response.headers.get("content-type", ""):
                raise EngineUnavailable(f"the server at {self.host} sent something other than a stream")
            async for line in _lines(bounded(response.content.iter_any(), f"the server at {self.host}", by_lines=True)):
                kind, _, value = line.partition(b":")
                if kind != b"data":
                    continue
                if value.strip() == b"[DONE]":
                    break
                yield self._event(value)
            # The connection can serve the next request only after this response has been read to its end.
            with suppress(TimeoutError, EngineUnavailable):
                async with asyncio.timeout(_END_S):
                    await self._read(response)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        pieces = bounded(response.content.iter_any(), f"the server at {self.host}", by_lines=False)
        return b"".join([piece async for piece in pieces])

    def _open_session(self) -> aiohttp.ClientSession:
        """The session. It belongs to the event loop on which the requests run."""
        if self._session is None:
            secure = ssl.create_default_context(cafile=certifi.where())
            # With a DNS cache, a request could go to an older address than the one that `_check_place` just checked.
            connector = aiohttp.TCPConnector(limit=0, ssl=secure, keepalive_timeout=IDLE_S, use_dns_cache=False)
            key_header = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers={"Accept-Encoding": "identity", **key_header},
                # Nothing is decompressed, because data could grow a thousandfold before its size is checked.
                auto_decompress=False,
                # There is no read timeout, because a server can send nothing for minutes while it loads its model or
                # reads a long prompt. The caller's stop event can end such a request.
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                # No proxy from the environment is used and no redirect is followed, so prompts go only to this address.
                trust_env=False,
            )
        return self._session

    async def _close_client(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _event(self, value: bytes) -> dict[str, Any]:
        beginning = value[:80].decode(errors="replace")
        try:
            event = bounded_json.loads(value)
        except (ValueError, RecursionError):
            raise EngineUnavailable(f"the server at {self.host} sent an event that is not JSON: {beginning}") from None
        if not isinstance(event, dict):
            raise EngineUnavailable(f"the server at {self.host} sent an event that is not an object: {beginning}")
        if event.get("error"):
            raise self._refusal(500, event)
        return event

    def _check(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        status = response.status
        if status == HTTPStatus.OK:
            return
        wait = _seconds(response.headers.get("retry-after", ""))
        if status == HTTPStatus.TOO_MANY_REQUESTS and wait is not None and wait <= _LONGEST_WAIT_S:
            raise _Busy(wait)
        try:
            body = bounded_json.loads(content)
        except (ValueError, RecursionError):
            body = content.decode(errors="replace")
        raise self._refusal(status, body)

    def _refusal(self, status: int, body: Any) -> RequestRefused:
        """Servers answer with {"error": {"message"}}, {"error": "…"}, {"message"}, {"detail"}, or no JSON at all."""
        error = body.get("error", body) if isinstance(body, dict) else body
        message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
        param = str(error.get("param") or "") if isinstance(error, dict) else ""
        text = " ".join(str(message or error).split())
        return RequestRefused(self.host, status, text.replace(self._key, "***") if self._key else text, param)

    async def _check_place(self) -> None:
        """Runs before each request to a host name, which may now resolve to another address than before."""
        if not self._may_be_called and (external_host := await asyncio.to_thread(outside, self.host)):
            raise Outside(
                f"{external_host} is outside private networks, or can't be found: set allow_external = true to let "
                "prompts go there"
            )

    def _translate_error(self, error: BaseException) -> KvasirError:
        if isinstance(error, RequestRefused) and error.status in _PERMANENT_STATUSES:
            message = error.message.lower()
            if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or any(words in message for words in _TOO_LONG):
                return ContextExceeded(f"the server refused the prompt: {error.message:.300}")
            return error
        if isinstance(error, KvasirError):
            return error
        if isinstance(error, _Busy):
            return EngineUnavailable(f"the server at {self.host} is busy for {error.seconds:.0f} s more")
        return EngineUnavailable(f"the server at {self.host} does not answer: {_error_text(error):.300}")

    def _is_gone(self, error: BaseException) -> bool:
        if isinstance(error, RequestRefused):
            return error.status in _UNAVAILABLE_STATUSES
        return isinstance(error, (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, Outside))


def permanent_error(refusal: RequestRefused) -> KvasirError:
    """The job's error for a refusal that would come again; the refusal itself if another attempt may succeed."""
    if refusal.status not in _PERMANENT_STATUSES:
        return refusal
    if any(word in f"{refusal.message} {refusal.param}".lower() for word in _NO_SCHEMA):
        return InvalidSchema(f"the JSON schema can't be made a constraint: {refusal.message:.300}")
    return InvalidPrompt(str(refusal))


def _error_text(error: BaseException) -> str:
    """The error's text, without what aiohttp adds: the memory address of a TLS context, and the URL again."""
    cause = getattr(error, "os_error", error)
    text = getattr(cause, "strerror", "") or getattr(cause, "message", "") or str(cause) or type(cause).__name__
    return " ".join(str(text).split())


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Lines as they are completed, without line ends. aiohttp's own reader has another length limit."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    yield rest


def _seconds(retry_after: str) -> float | None:
    """The seconds in a Retry-After header, which holds a number or a date."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def outside(url: str) -> str:
    """The host of a URL if it is outside private networks, "" if it is inside. A name is inside only if all of its
    addresses are.

    A name without an address is inside if its ending is reserved for private networks. This call blocks while names are
    resolved.
    """
    host = urlsplit(url).hostname or ""
    try:
        addresses = {
            str(address_info[4][0]) for address_info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        return "" if f".{host}".endswith(_INSIDE_NAMES) else host
    return "" if all(_is_inside(address) for address in addresses) else host


def is_fixed_address(url: str) -> bool:
    """Whether the URL's host is an address or `localhost`, which needs no name lookup and does not change."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host.replace(".", "").isdigit() or ":" in host


def _is_inside(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    ipv4 = getattr(ip, "ipv4_mapped", None) or ip
    return any(ipv4 in network for network in _INSIDE)

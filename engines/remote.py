"""What engines share that use a model behind an HTTP server: text goes in and out, without KV caches.

Requests run on one event loop in a separate thread. The caller waits for the answer, checks its stop event, and cancels
if it is set. Closing the connection tells the server.
"""

import asyncio
import json
import logging
import math
import queue
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from operator import not_
from typing import Any, Generic, TypeVar

from tenacity import AsyncRetrying, retry_if_result, wait_exponential

from engines.base import Answer, EngineInfo, TokenizedPrompt
from engines.chat import SAMPLE, PromptMessage, chat
from engines.waiting import POLL_S, check_running
from messages.errors import (
    ConfigError,
    ContextExceeded,
    EngineUnavailable,
    InvalidPrompt,
    InvalidSchema,
    KvasirError,
    KVTransferFailed,
)
from messages.jobs import Part, PrefillReport, Sampling
from messages.kv import KVCache, Record
from messages.limits import MAX_REPLY_BYTES, MAX_STREAM_BYTES, MAX_WAITING_EVENTS

_log = logging.getLogger(__name__)

CONNECT_S = 10.0
# Idle connections are reused for one second at most. Servers close an idle connection after 2 s (gunicorn), 5 s
# (llama.cpp, uvicorn) or more. A request is lost if it is sent just as the server closes the connection. The client
# notices this at once, before the server has begun to work, and sends the request again.
IDLE_S = 1.0
_LOST_AT_ONCE_S = 1.0
_MOST_SENT = 4  # a request is sent at most this many times, because a repeat can get a closed connection, too
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0  # first and longest pause between two probes of an unavailable server
FINISH_REASONS = ("stop", "length")  # the finish reasons of a complete answer
RANDOM_SEED = 0xFFFFFFFF  # llama.cpp, which some servers use, picks a random seed if it is given this one
LETTERS_PER_TOKEN = 3.0  # assumed until the server has counted the sample's tokens

# If a server counts less than this share of the tokens that were expected, it has cut the prompt. The average length of
# a token varies, too, but not enough to explain such a low count.
_CUT = 0.6
# When Ollama cuts a prompt, it keeps half the context, plus the prompt's first few tokens. So if a server counts about
# that many tokens, the prompt counts as uncut only if about that many were expected.
_KEPT, _CUT_TO_HALF = 8, 0.85
_TEMPLATE_BYTES = 1024  # maximum number of bytes that a template can add to a prompt
# Runs of a repeated character. A run takes one or two tokens, however long it is.
_RUN = re.compile(r"(.)\1{3,}", re.DOTALL)
_NEIGHBOUR_TOKENS = 256  # a prompt with fewer tokens is mostly template, so no average is taken from it
_KNOWN_MARK = re.compile(
    r"<(?=[|｜][^<>\n]{1,64}[|｜]>|<SYS>>|\|?turn\|?>|/?(?:s|bos|eos|pad|unk|think|(?:start|end)_of_(?:turn|text|image)"
    r"|tool_call|tool_response|im_start|im_end|unused\d{1,4})>)|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w+)\])",
    re.IGNORECASE,
)


def new_sample() -> str:
    """The sample with a new first line, because some servers don't count tokens that they find in a prompt cache."""
    return f"{secrets.token_hex(4)}\n{SAMPLE}"


def break_mark(first: re.Match[str]) -> str:
    """The first character of a control token, followed by an invisible character that no control token contains."""
    return first[0] + "\u200b"


def break_known_marks(text: str) -> str:
    """A text in which known families' control tokens are broken up, because a server would treat them as its own."""
    return _KNOWN_MARK.sub(break_mark, text)


def check_json(text: str, server_name: str) -> None:
    """Raises InvalidSchema if the text is not JSON, because some servers treat a schema only as a hint."""
    try:
        json.loads(text)
    except ValueError:
        raise InvalidSchema(
            f"{server_name} did not follow the JSON schema; its answer begins with {text!r:.80}"
        ) from None


async def bounded(pieces: AsyncIterator[bytes], server_name: str, by_lines: bool) -> AsyncIterator[bytes]:
    """A server's answer, piece by piece.

    Raises EngineUnavailable as soon as the answer is longer than allowed, or with `by_lines`, as soon as a line is.
    """
    total = unused = 0
    async for piece in pieces:
        line_end = piece.rfind(b"\n") if by_lines else -1
        unused = len(piece) - line_end - 1 + (unused if line_end < 0 else 0)
        total += len(piece)
        if unused > MAX_REPLY_BYTES or total > MAX_STREAM_BYTES:
            raise EngineUnavailable(f"{server_name} sent a longer answer than Kvasir accepts")
        yield piece


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None


class RemoteServer(ABC):
    """A server whose requests can be cancelled while it computes. Its methods may be called from any thread.

    When the server is gone, it is probed repeatedly, and counts as away until it answers.
    """

    disconnect_errors: tuple[type[BaseException], ...]  # errors that the client raises if the server hangs up

    def __init__(self, name: str) -> None:
        self.outage = ""  # why the server is unavailable now; see engines.base.outage_of
        self._name = name
        self._search: asyncio.Task[None] | None = None
        self._closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-http", daemon=True)
        self._thread.start()

    @abstractmethod
    def _translate_error(self, error: BaseException) -> KvasirError:
        """The job's error for a failed request."""

    @abstractmethod
    def _is_gone(self, error: BaseException) -> bool:
        """Whether an error means that the server is gone."""

    @abstractmethod
    async def _probe(self) -> Any:
        """Send a request that costs nothing."""

    @abstractmethod
    async def _close_client(self) -> None:
        """Close the client's connections."""

    def _call(self, send: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The result of a request with a single result. Raises the error from `_translate_error`, and EngineUnavailable
        once closed."""

        async def produce_one() -> AsyncIterator[Any]:
            yield await send()

        with closing(self._receive(produce_one, None)) as pieces:
            return next(pieces)

    def _receive(
        self, produce: Callable[[], AsyncIterator[Any]], stop: threading.Event | None
    ) -> Generator[Any, None, None]:
        """The results of a request, one after the other. Raises the errors of `_call`, and Cancelled soon after `stop`
        is set."""
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        check_running(self._name, self._closed, stop)
        task = asyncio.run_coroutine_threadsafe(self._deliver(produce, inbox), self._loop)
        try:
            while True:
                try:
                    piece = inbox.get(timeout=POLL_S)
                except queue.Empty:
                    check_running(self._name, self._closed, stop)
                    continue
                check_running(self._name, self._closed, stop)
                if not isinstance(piece, _End):
                    yield piece
                elif piece.error is None:
                    return
                else:
                    raise self._translate_error(piece.error) from piece.error
        finally:
            task.cancel()

    async def _deliver(self, produce: Callable[[], AsyncIterator[Any]], inbox: queue.SimpleQueue[Any]) -> None:
        start, sent_count = time.monotonic(), 0
        while True:
            try:
                sent_count += 1
                async for piece in produce():
                    sent_count = _MOST_SENT
                    while inbox.qsize() >= MAX_WAITING_EVENTS:  # the reader can be slower than the server
                        await asyncio.sleep(POLL_S / 10)
                    inbox.put(piece)
            except BaseException as error:
                lost_at_once = isinstance(error, self.disconnect_errors) and time.monotonic() - start < _LOST_AT_ONCE_S
                if lost_at_once and sent_count < _MOST_SENT:
                    continue
                self._note(error)
                inbox.put(_End(error))
                if isinstance(error, asyncio.CancelledError):
                    raise
                return
            else:
                return inbox.put(_End(None))

    def _note(self, error: BaseException) -> None:
        """Note an error before the job learns of it, so that its worker doesn't take another job."""
        if not (self.outage or self._closed.is_set()) and self._is_gone(error):
            self.outage = str(self._translate_error(error))
            self._search = asyncio.create_task(self._await_return())

    async def _await_return(self) -> None:
        """Probe the server, at once because it may only have closed one connection, and then until it answers, even
        with an error."""
        if not await self._answers():
            _log.warning("%s; until it does, its worker takes no jobs", self.outage)
            pauses = wait_exponential(_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S)
            await AsyncRetrying(retry=retry_if_result(not_), wait=pauses)(self._answers)
            _log.warning("the server of the %s engine answers again", self._name)
        self.outage = ""

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._probe()
        except Exception as error:  # noqa: BLE001  the client may raise any error
            return not isinstance(error, TimeoutError) and not self._is_gone(error)
        return True

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
        if self._search is not None:
            # Let the search's probe finish, because Anyio warns if a connection is ended while it is being opened.
            await asyncio.wait({self._search}, timeout=POLL_S)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close_client()
        await self._loop.shutdown_asyncgens()


S = TypeVar("S", bound=RemoteServer)


class TextOnly(Generic[S]):
    """The part of an engine that refuses ids and KV caches. Its prefill half passes every job through.

    The subclass, which answers, sets `info`.
    """

    info: EngineInfo

    def __init__(self, server: S, server_name: str, context: int) -> None:
        self._server = server
        self._server_name = server_name
        self._context = context
        self._letters_per_token = LETTERS_PER_TOKEN
        self._neighbours_bytes_per_token = 0.0  # mean over recently answered prompts; 0 before the first

    @property
    def outage(self) -> str:
        """See engines.base.outage_of."""
        return self._server.outage

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. The model stays loaded, because others may be using it.
        Idempotent."""
        self._server.close()

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        """Returns no ids, because the server doesn't reveal them."""
        return TokenizedPrompt((), 0)

    def count_tokens(self, text: str) -> int:
        """An estimate, based on the sample that the server counted at the start."""
        return math.ceil(len(text) / self._letters_per_token)

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Record], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> PrefillReport:
        """Always raises KVTransferFailed, because the server gives out no KV cache."""
        raise KVTransferFailed(f"{self._server_name} can't give out a KV cache")

    def decode(
        self,
        tokens: Sequence[int],
        cache: KVCache | None,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """Always raises KVTransferFailed, because only text can be sent (`decode_text`), no ids and no KV cache."""
        raise KVTransferFailed(f"{self._server_name} accepts no token ids and no KV cache")

    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> AbstractContextManager[None]:
        """Always raises KVTransferFailed, like `decode`."""
        raise KVTransferFailed(f"{self._server_name} accepts no token ids and no KV cache")

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """Always raises KVTransferFailed, like `decode`."""
        raise KVTransferFailed(f"{self._server_name} accepts no token ids and no KV cache")

    def _check_capacity(self, sampling: Sampling) -> None:
        if sampling.max_tokens >= self._context:
            raise ContextExceeded(
                f"max_tokens is {sampling.max_tokens:,}, but the context holds only {self._context:,} tokens"
            )

    def _messages(self, prompt: Sequence[Part]) -> list[PromptMessage]:
        """The messages of a prompt. Raises InvalidPrompt for an answer to be continued, because servers treat it
        differently."""
        messages = chat(prompt)
        if messages[-1].is_continued:
            raise InvalidPrompt(f"{self._server_name} can't continue an answer: end the prompt with a user message")
        return messages

    def _check_whole(self, prompt: Sequence[Part], sampling: Sampling, prompt_tokens: int) -> None:
        """Raises ContextExceeded unless the whole prompt was read. `prompt_tokens` is 0 if the server doesn't report
        it."""
        if prompt_tokens + sampling.max_tokens > self._context:
            raise ContextExceeded(
                f"the prompt has {prompt_tokens:,} tokens (more, if {self._server_name} cut it) and the answer up to "
                f"{sampling.max_tokens:,}, but the context holds only {self._context:,}"
            )
        text = "".join(part.text for part in prompt)
        # The prompt's length is counted in bytes of UTF-8, because a token has about the same number of bytes in every
        # language.
        num_bytes = len(_RUN.sub(r"\1\1\1", text).encode("utf-8", "surrogatepass"))
        # `_letters_per_token` was measured on an ASCII sample, so it is also the number of bytes per token.
        expected = num_bytes / (self._neighbours_bytes_per_token or self._letters_per_token)
        is_cut = 0 < prompt_tokens < expected * _CUT
        if 0 <= prompt_tokens - self._context // 2 <= _KEPT:
            expected = max(expected, num_bytes / self._letters_per_token)
            is_cut = not expected * _CUT_TO_HALF <= prompt_tokens <= expected / _CUT_TO_HALF
        # A token has at least one byte, so a prompt with fewer bytes than the context has tokens is never cut.
        if is_cut and len(text.encode("utf-8", "surrogatepass")) + _TEMPLATE_BYTES > self._context:
            raise ContextExceeded(
                f"{self._server_name} seems to have cut a prompt of about {expected:,.0f} tokens to {prompt_tokens:,}"
            )
        if num_bytes and prompt_tokens >= _NEIGHBOUR_TOKENS:
            known, observed = self._neighbours_bytes_per_token, num_bytes / prompt_tokens
            self._neighbours_bytes_per_token = (known + observed) / 2 if known else observed


def context_of(server_name: str, model: str, trained_context: int, requested_context: int) -> int:
    """The context to use. `trained_context`: the server's figure; 0 if it gives none.

    Raises ConfigError if `requested_context` is longer than that, or if neither is known.
    """
    if trained_context and requested_context > trained_context:
        raise ConfigError(
            f"{model} was trained for a context of {trained_context:,} tokens; set context to at most this number"
        )
    if not (requested_context or trained_context):
        raise ConfigError(f"{server_name} does not state the maximum context of {model}: set context")
    return requested_context or trained_context

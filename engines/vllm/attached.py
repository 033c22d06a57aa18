"""A running `vllm serve` with Kvasir's connector: requests go by HTTP, keys and values through shared memory.

The server's own API does what the host process does for Kvasir's own vLLM, and the connector does the rest (`events`).
Somebody else starts and stops the server. If it vanishes, it is searched for again, and used again only if it serves
the same model.
"""

import logging
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from engines.entry import closed_on_failure, options_in
from engines.llamacpp.http import LlamaServer, ServerRefused
from engines.logprobs import TOP
from engines.program import FIRST_PAUSE_S, SHARED_MEMORY
from engines.vllm.conversation import (
    SILENT_S,
    Conversation,
    layout_seen,
)
from engines.vllm.host.kvasir_vllm import events
from engines.vllm.host.kvasir_vllm.shared_folder import bind
from engines.vllm.host.kvasir_vllm.wire import Message
from engines.waiting import POLL_S
from messages.errors import Cancelled, ConfigError, EngineUnavailable, InvalidMessage, KvasirError
from messages.kv import Array, cast
from messages.limits import MAX_WAITING_EVENTS

_log = logging.getLogger(__name__)

COMMAND = "kvasir engines connector FOLDER"
_COMPLETIONS = "/v1/completions"
_LONGEST_PAUSE_S = 5.0  # between two probes of an unavailable server; it is short, because jobs wait for the server
_GREETING = (0, 1, 2, 3)  # a test prompt; its text has no meaning
# Relative tolerance. It is needed because two computations of the same keys and values can differ by a few steps of
# bfloat16.
_TOLERANCE = 0.02

# These settings are sent with each request, because a server can have other defaults.
_PLAIN = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
          "frequency_penalty": 0, "n": 1, "return_token_ids": True}  # fmt: skip


def connect(weights: str, api_key: str = "") -> "tuple[AttachedServer, str]":
    """The server of `http://HOST:PORT?model=FOLDER&shared=FOLDER`, and `model`; "": left out. Raises ConfigError."""
    parts = urlsplit(weights)
    settings = options_in(weights, parts.query, "model", "shared")
    url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")
    return AttachedServer(url, Path(settings.get("shared", SHARED_MEMORY)), api_key), settings.get("model", "")


class AttachedServer(Conversation):
    """A vLLM server at `url`, which reaches `shared_folder` too."""

    def __init__(self, url: str, shared_folder: Path, api_key: str = "") -> None:
        """Returns once the server has shown what it serves. Raises ConfigError, which says what to do."""
        if not shared_folder.is_dir():
            raise ConfigError(f"there is no folder {shared_folder}; the worker and vLLM must share a folder")
        super().__init__(shared_folder)
        self._server = LlamaServer(url, "vLLM", api_key)
        self._events = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bind(self._events, self._handle, self.folder / events.SOCKET)
        self._draining = threading.Lock()
        self._evaluated_tokens: dict[str, int] = {}
        self._failed_keys: set[str] = set()
        self._stops: dict[str, threading.Event] = {}
        self._up = threading.Event()
        self._outage_reason = ""  # the reason for this outage, or for the last one
        self._block = 1
        self._thread = threading.Thread(target=self._watch_server, name="vllm-server", daemon=True)
        with closed_on_failure(self):
            try:
                self.served_model, self._numbers = self._greet()
            except EngineUnavailable as error:
                raise ConfigError(_with_remedy(error)) from None
        self._up.set()
        self._thread.start()

    @property
    def outage(self) -> str:
        """See Conversation."""
        return "" if self._up.is_set() else f"{self._server.url} is looked for again: {self._outage_reason}"

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. The server keeps running. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._server.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._events.close()
        self._close_folder()

    def _begin(self, key: str, request: Message) -> None:
        if outage := self.outage:
            raise EngineUnavailable(outage)
        self._stops[key] = threading.Event()
        threading.Thread(target=self._run_request, args=(key, request), name="vllm-request", daemon=True).start()

    def _abort(self, key: str) -> None:
        if stop := self._stops.get(key):
            stop.set()  # closes the connection, which tells the server to stop

    def _give_up(self, reason: str) -> None:
        """Start to search for the server again, and tell all waiting callers."""
        if self._up.is_set():
            self._outage_reason = reason
            self._up.clear()
            _log.warning("%s", self.outage)
            self._fail_all(f"{self._server.url}: {reason}")

    def _run_request(self, key: str, request: Message) -> None:
        """Run one request from start to end."""
        end_message: Message = {"op": "failed", "kind": "engine", "why": "vLLM's answer broke off"}
        try:
            for tokens in self._stream_tokens(key, request):
                while (inbox := self._inboxes.get(key)) and inbox.qsize() >= MAX_WAITING_EVENTS:
                    time.sleep(POLL_S)  # waits for a reader that is slower than the server
                self._hand_on(tokens)
                if tokens["last"]:
                    end_message = {"op": "done", "evaluated": tokens["evaluated"]}
        except Cancelled:
            return
        except ServerRefused as error:
            end_message = {"op": "failed", "kind": _kind(error, request), "why": str(error)}
            if error.status >= 500 and end_message["kind"] == "engine":
                self._give_up(str(error))
        except EngineUnavailable as error:
            self._give_up(str(error))
            end_message["why"] = str(error)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            end_message["why"] = f"vLLM's answer is not understood: {error!r:.200}"
        finally:
            self._drain()
            if key not in self._failed_keys:  # if the request failed, the connector has already sent the reason
                self._hand_on(end_message | {"id": key})
            self._failed_keys.discard(key)
            self._evaluated_tokens.pop(key, None)
            self._stops.pop(key, None)

    def _stream_tokens(self, key: str, request: Message) -> Iterator[Message]:
        body = self._body(key, request["tokens"], request["max_tokens"], request["emit"], request["inject"])
        body["stop_token_ids"] = request["ends"]
        body["kv_transfer_params"][events.NAME]["sampling"] = request["sampling"]
        if request["constraint"]:
            body["structured_outputs"] = request["constraint"]
        if request["logprobs"]:
            body |= {"logprobs": request["logprobs"], "return_tokens_as_token_ids": True}
        for event in self._server.stream(_COMPLETIONS, body | {"stream": True}, self._stops[key]):
            self._drain()  # handle the connector's waiting messages first
            for choice in event["choices"]:
                yield {
                    "op": "tokens",
                    "id": key,
                    "tokens": [int(token) for token in choice["token_ids"]],
                    "logprobs": _likely(choice) if request["logprobs"] else None,
                    "evaluated": self._evaluated_tokens.get(key, 0),
                    "last": bool(choice.get("finish_reason")),
                }

    def _body(self, key: str, tokens: Any, max_tokens: int, emit: int | None, inject: Any) -> dict[str, Any]:
        transfer = {"version": events.VERSION, "key": key, "folder": self.folder.name, "block": self._block}
        transfer |= {"emit": emit, "inject": inject, "sampling": None}
        # Requests share vLLM's prefix cache only if they have the same salt, and this salt is unique. So the counter of
        # evaluated tokens shows what vLLM really computed, and no other request reuses values that were computed
        # elsewhere.
        request = {"prompt": list(tokens), "max_tokens": max_tokens, "cache_salt": key}
        return _PLAIN | request | {"kv_transfer_params": {events.NAME: transfer}}

    def _greet(self) -> tuple[Message, Array]:
        """The server's model, and the keys and values of a short prompt. Raises EngineUnavailable and ConfigError."""
        key = uuid.uuid4().hex
        inbox = self._inboxes[key] = SimpleQueue()
        try:
            body = self._body(key, _GREETING, 1, 0, None) | {"logprobs": TOP}
            # The whole greeting is one block, whatever the model's block length is. So the values always have the same
            # layout.
            body["kv_transfer_params"][events.NAME]["block"] = len(_GREETING)
            answer = self._server.post(_COMPLETIONS, body, timeout_s=SILENT_S)
            self._drain()
            description = (answer.get("kv_transfer_params") or {}).get(events.NAME)
            if not isinstance(description, dict):
                raise ConfigError(
                    f"vLLM at {self._server.url} runs without Kvasir's connector, or with an old connector: run "
                    f"{COMMAND}, which writes the connector and says how to start vLLM with it"
                )
            if description.get("version") != events.VERSION:
                raise ConfigError(
                    f"the connector in {self._server.url} speaks version {description.get('version')}, but this "
                    f"release speaks version {events.VERSION}: run {COMMAND}, then restart vLLM"
                )
            with suppress(Empty):
                return self._learn_layout(description, inbox.get_nowait())
            raise ConfigError(
                f"the connector in {self._server.url} does not reach {self.folder}: start vLLM on this machine, as the "
                "same user or as root; if it runs in a container, start the container with --ipc=host"
            )
        finally:
            del self._inboxes[key]
            self._discard_files(inbox)
            self._failed_keys.discard(key)
            self._evaluated_tokens.pop(key, None)

    def _learn_layout(self, description: Message, message: Message) -> tuple[Message, Array]:
        """What the connector reported about the greeting's KV cache. Raises ConfigError."""
        if message["op"] == "failed":
            raise ConfigError(f"the connector in {self._server.url} can't work with this vLLM: {message['why']}")
        try:
            layout = layout_seen(message["shape"])
            with self.open_file(message["file"]) as file:
                shape = layout.block_shape(len(_GREETING))  # only this much is read, even if the file is longer
                numbers = cast(np.fromfile(file, layout.numpy_type, int(np.prod(shape))), layout.dtype, "f32")
        except (TypeError, ValueError, OSError, InvalidMessage) as error:
            raise ConfigError(f"vLLM at {self._server.url} sends its KV cache in an unknown form: {error}") from None
        finally:
            self.remove_file(message["file"])
        self._block = layout.block_tokens
        return description | {"shape": message["shape"]}, numbers

    def _watch_server(self) -> None:
        """Receive the connector's messages. While the server is away, search for it."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            if self._up.is_set():
                pause_s = FIRST_PAUSE_S
                if select.select([self._events], [], [], POLL_S)[0]:
                    self._drain()
                continue
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            try:
                self._take_up(*self._greet())
            except KvasirError as error:
                if self._closing.is_set():
                    return
                if str(error) != self._outage_reason:  # reported once
                    self._outage_reason = str(error)
                    _log.warning("%s", self.outage)

    def _take_up(self, served_model: Message, numbers: Array) -> None:
        """The server is back. Raises ConfigError if it now computes something else."""
        expected = self.served_model | {"instance": served_model["instance"]}
        is_alike = numbers.shape == self._numbers.shape and bool(
            np.linalg.norm(numbers - self._numbers) <= _TOLERANCE * np.linalg.norm(self._numbers)
        )
        if served_model != expected or not is_alike:
            raise ConfigError("vLLM serves another model now: restart the worker to use the new model")
        self.served_model = served_model
        _log.warning("%s is there again", self._server.url)
        self._up.set()

    def _drain(self) -> None:
        """Receive the connector's waiting messages."""
        with self._draining, suppress(BlockingIOError):
            while True:
                datagram = self._events.recv(events.LARGEST, socket.MSG_DONTWAIT)
                with suppress(KeyError, TypeError, ValueError, OSError):
                    # A message that can't be read is ignored, because it is not from the connector.
                    self._handle_event(events.unpack_datagram(datagram))

    def _handle_event(self, message: Message) -> None:
        key = str(message["id"])
        self._last_message_at = time.monotonic()
        if message["op"] == "evaluated":
            if key in self._inboxes:
                self._evaluated_tokens[key] = int(message["tokens"])
            if self._up.is_set() and message["instance"] != self.served_model["instance"]:
                self._give_up("it was started again")
        elif message["op"] == "failed":
            self._failed_keys.add(key)
            self._hand_on({"op": "failed", "id": key, "kind": "kv", "why": str(message["why"])})
        elif message["op"] in ("block", "window"):
            self._hand_on(message)


def _kind(error: ServerRefused, request: Message) -> str:
    """What a refusal is about."""
    if error.status < 500:
        return "schema" if request["constraint"] else "engine"
    return "kv" if request["inject"] else "engine"


def _likely(choice: dict[str, Any]) -> list[tuple[int, float]]:
    """The likeliest ids for the first token, with their log-probabilities."""
    top_logprobs = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
    first: dict[str, float] = top_logprobs[0]
    return [(int(name.removeprefix("token_id:")), float(value)) for name, value in first.items()]


def _with_remedy(error: EngineUnavailable) -> str:
    if isinstance(error, ServerRefused):
        remedies = {
            401: "set KVASIR_API_KEY, or api_key_file in the model's table",
            400: f"start it as {COMMAND} says",
            404: "is it a vLLM?",
        }
        return f"{error}; {remedies.get(error.status, 'look at its log')}"
    return f"{error}; is it running there?"

"""Requests to vLLM and its answers, whether Kvasir runs it (`process`) or somebody else (`attached`).

While vLLM is down, requests raise EngineUnavailable, and jobs are tried again.
"""

import os
import queue
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from engines.llamacpp.start import make_slot_folder
from engines.vllm.host.kvasir_vllm.shared_folder import open_file, open_folder
from engines.vllm.host.kvasir_vllm.wire import Message
from engines.waiting import POLL_S, check_running
from messages.errors import EngineUnavailable, InvalidSchema, KvasirError, KVTransferFailed
from messages.kv import KVLayout

SILENT_S = 120.0  # a busy vLLM that is silent for this many seconds counts as hung; one step takes a few seconds
_KINDS: dict[str, type[KvasirError]] = {"kv": KVTransferFailed, "schema": InvalidSchema, "engine": EngineUnavailable}


def layout_seen(shape: Message) -> KVLayout:
    """The layout that vLLM's connector describes. Raises TypeError, InvalidMessage."""
    return KVLayout(**shape | {"window_layers": tuple(shape.get("window_layers", ()))})


class Conversation(ABC):
    """A vLLM with a loaded model, and a folder that both sides can reach. Callable from any thread."""

    def __init__(self, parent: Path) -> None:
        self.folder, self._remove_folder = make_slot_folder(parent)
        self._handle = open_folder(self.folder)
        self.served_model: Message = {}
        self._inboxes: dict[str, queue.SimpleQueue[Message]] = {}
        self._last_message_at = 0.0  # when vLLM last sent a message; monotonic clock
        self._closing = threading.Event()

    @property
    @abstractmethod
    def outage(self) -> str:
        """Why vLLM can't be asked now; "" if it can."""

    @abstractmethod
    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. Idempotent."""

    @abstractmethod
    def _begin(self, key: str, request: Message) -> None:
        """Send a `generate` request (see `wire`). Raises EngineUnavailable."""

    @abstractmethod
    def _abort(self, key: str) -> None:
        """Tell vLLM that the request is no longer wanted."""

    @abstractmethod
    def _give_up(self, reason: str) -> None:
        """vLLM hangs: fail all requests. May be called repeatedly."""

    def ask(self, stop: threading.Event | None, **request: Any) -> Generator[Message, None, None]:
        """The messages for one `generate` request; the last one is `done`.

        Raises Cancelled soon after `stop` is set, EngineUnavailable, KVTransferFailed, InvalidSchema.
        """
        self.check(stop)
        key = uuid.uuid4().hex
        inbox = self._inboxes[key] = queue.SimpleQueue()
        is_finished, asked_at = False, time.monotonic()
        try:
            self._begin(key, request)
            while not is_finished:
                try:
                    message = inbox.get(timeout=POLL_S)
                except queue.Empty:
                    self.check(stop)
                    if time.monotonic() - max(self._last_message_at, asked_at) > SILENT_S:
                        self._give_up(f"nothing was heard of it for {SILENT_S:.0f} s of work: it hangs")
                    continue
                self._check_wanted(message, stop)
                if message["op"] == "failed":
                    raise _KINDS[message["kind"]](message["why"])
                is_finished = message["op"] == "done"
                yield message
        finally:
            del self._inboxes[key]
            if not is_finished:
                self._abort(key)
            self._discard_files(inbox)

    def check(self, stop: threading.Event | None) -> None:
        """Raises EngineUnavailable once it is closed, and Cancelled once `stop` is set."""
        check_running("vllm", self._closing, stop)

    def open_file(self, name: object, flags: int = os.O_RDONLY) -> BinaryIO:
        """Open a file that vLLM names. It must be in the folder, whatever the name is. Raises OSError."""
        descriptor = open_file(self._handle, Path(str(name)).name, flags)
        return open(descriptor, "wb" if flags & os.O_WRONLY else "rb")

    def remove_file(self, name: object) -> None:
        """Remove a file. It, and the folder, may already be gone."""
        with suppress(OSError):
            os.unlink(Path(str(name)).name, dir_fd=self._handle)

    def _close_folder(self) -> None:
        """Close the folder and delete it."""
        handle, self._handle = self._handle, -1
        os.close(handle)
        self._remove_folder()

    def _check_wanted(self, message: Message, stop: threading.Event | None) -> None:
        try:
            self.check(stop)
        except KvasirError:
            self._discard(message)
            raise

    def _hand_on(self, message: Message) -> None:
        inbox = self._inboxes.get(str(message.get("id")))
        if inbox is not None:
            inbox.put(message)
        else:
            self._discard(message)

    def _fail_all(self, reason: str) -> None:
        for inbox in list(self._inboxes.values()):
            inbox.put({"op": "failed", "kind": "engine", "why": reason})

    def _discard_files(self, inbox: queue.SimpleQueue[Message]) -> None:
        with suppress(queue.Empty):
            while True:
                self._discard(inbox.get_nowait())

    def _discard(self, message: Message) -> None:
        if "file" in message:
            self.remove_file(message["file"])

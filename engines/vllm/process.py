"""Runs the host process: starts it, restarts it if it dies or hangs, and ends it with this process."""

import atexit
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.program import (
    END_S,
    FIRST_PAUSE_S,
    LAST_WORDS,
    LOAD_S,
    LONGEST_PAUSE_S,
    SHARED_MEMORY,
    STEADY_S,
    ends_with_us,
    read_output,
)
from engines.vllm import environment
from engines.vllm.conversation import Conversation
from engines.vllm.environment import Environment
from engines.vllm.host import kvasir_vllm
from engines.vllm.host.kvasir_vllm import wire
from engines.vllm.host.kvasir_vllm.shared_folder import bind
from engines.vllm.host.kvasir_vllm.wire import Message
from engines.waiting import POLL_S
from messages.errors import ConfigError, EngineUnavailable

_log = logging.getLogger(__name__)

_PROGRAM = "the vLLM host"
_RESTARTING = f"{_PROGRAM} is being started again"
_PATH = Path(kvasir_vllm.__file__).parents[1]
# Ends all of vLLM's processes. (In dash `kill -9 -- -PID` is an error; all shells accept -s.)
_KILL = '{ kill -s TERM -- "-$1"; sleep 5; kill -s KILL -- "-$1"; }'
_ERROR_WORDS = ("error", "fail", "exception")


@dataclass(frozen=True, slots=True)
class HostLaunch:
    """What a host loads: `arguments` for vLLM, block length of the KV cache, CPU threads (0: vLLM's choice)."""

    environment: Environment
    model: str  # the model's name in log and error messages
    arguments: dict[str, Any]
    block: int
    threads: int = 0


class HostProcess(Conversation):
    """A vLLM host with its model loaded."""

    def __init__(self, launch: HostLaunch) -> None:
        """Returns once the model is loaded. Raises ConfigError, with the reason, if it can't be loaded."""
        has_shared_memory = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
        super().__init__(SHARED_MEMORY if has_shared_memory else Path(tempfile.gettempdir()))
        self.launch = launch
        self._output_lines: deque[str] = deque(maxlen=LAST_WORDS)
        self._lock = threading.Lock()
        self._given_up = False  # whether the process was ended because it hung
        self._up = threading.Event()
        self._first_start_ended = threading.Event()  # set as soon as the first start has succeeded or failed
        self._connection: socket.socket | None = None
        self.process: subprocess.Popen[str] | None = None  # the process that runs now, or ran last
        self._listener = self._listening()
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._supervise, name="vllm-host", daemon=True)
        self._thread.start()
        self._first_start_ended.wait(LOAD_S)
        if not self.served_model:
            reason, release = self._last_words(), launch.environment.release
            tested = environment.TESTED_RELEASE
            note = "" if release == tested else f" (vLLM {release}; tested with {tested})"
            self.close()
            raise ConfigError(f"vLLM can't load {launch.model}: {reason or 'it said nothing'}{note}")

    @property
    def outage(self) -> str:
        """See Conversation."""
        return "" if self._up.is_set() else _RESTARTING

    def close(self) -> None:
        """End the process. Calls in progress raise EngineUnavailable. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._listener.close()
        self._end()
        self._thread.join(2 * END_S)
        self._close_folder()

    def _begin(self, key: str, request: Message) -> None:
        self._send({"op": "generate", "id": key} | request)

    def _abort(self, key: str) -> None:
        with suppress(EngineUnavailable):
            self._send({"op": "abort", "id": key})

    def _give_up(self, reason: str) -> None:
        """End the process, so that another one is started."""
        with self._lock:
            first, self._given_up = not self._given_up, True
        if first:
            self._output_lines.append(f"error: {reason}")
            threading.Thread(target=self._end, name="vllm-host-end", daemon=True).start()

    def _send(self, message: Message) -> None:
        try:
            with self._lock:
                if self._connection is None or not self._up.is_set():
                    raise EngineUnavailable(_RESTARTING)
                self._connection.sendall(wire.pack_message(message))
        except OSError as error:
            raise EngineUnavailable(f"{_PROGRAM} is gone: {error}") from None

    def _listening(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind(listener, self._handle, self.folder / "host.sock")
        listener.listen(1)
        listener.settimeout(POLL_S)
        return listener

    def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            loaded_at = self._run_once()
            if self._closing.is_set() or not self._first_start_ended.is_set():
                break
            steady = loaded_at is not None and time.monotonic() - loaded_at > STEADY_S
            pause_s = FIRST_PAUSE_S if steady else pause_s
            _log.warning("%s ended, and is started again in %.0f s: %s", _PROGRAM, pause_s, self._last_words())
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        self._first_start_ended.set()

    def _run_once(self) -> float | None:
        """One host's life. Returns when its model was loaded."""
        if not self._spawn():
            return None
        process = self.process
        assert process is not None
        loaded_at = None
        listener = threading.Thread(target=read_output, args=(process, self._output_lines, _log, _PROGRAM), daemon=True)
        listener.start()
        with ends_with_us(process.pid, _KILL):
            try:
                connection = self._accept(process)
                if connection is not None:
                    with connection:
                        loaded_at = self._converse(connection)
            finally:
                self._up.clear()
                with self._lock:
                    self._connection = None
                self._fail_all(f"{_PROGRAM} died")
                self._end()
                process.wait()
        listener.join(END_S)
        return loaded_at

    def _spawn(self) -> bool:
        """Start the process. Returns False if it is no longer needed."""
        with self._lock:
            if self._closing.is_set():
                return False
            self.process = subprocess.Popen(
                [self.launch.environment.python, "-P", "-m", "kvasir_vllm.main", self.folder / "host.sock"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=vllm_environ(dict(os.environ), self.launch.threads),
                # vLLM's processes form a group, so that they can be ended together. Ctrl-C then reaches only Kvasir's
                # process.
                start_new_session=True,
            )
            return True

    def _accept(self, process: subprocess.Popen[str]) -> socket.socket | None:
        """The host's connection; None if it dies or hangs before connecting."""
        patience = time.monotonic() + LOAD_S
        while process.poll() is None and not self._closing.is_set() and time.monotonic() < patience:
            with suppress(TimeoutError, OSError):
                connection, _ = self._listener.accept()
                connection.settimeout(LOAD_S)  # the host must load its model within this time
                return connection
        return None

    def _converse(self, connection: socket.socket) -> float | None:
        """Load the model, then pass on messages until the connection ends. Returns when the model was loaded; None if
        it wasn't."""
        version = {"version": wire.VERSION, "block": self.launch.block, "arguments": self.launch.arguments}
        connection.sendall(wire.pack_message({"op": "load"} | version))
        loaded_at = None
        with suppress(OSError, wire.GarbledMessage), connection.makefile("rb") as stream:
            while (message := wire.read_message(stream.read)) is not None:
                self._last_message_at = time.monotonic()
                if message["op"] == "loaded":
                    connection.settimeout(None)
                    loaded_at = time.monotonic()
                    self._take_up(connection, message)
                elif message["op"] == "refused":
                    self._output_lines.append(f"refused: {message['why']}")
                elif message["op"] != "step":
                    self._hand_on(message)
        return loaded_at

    def _take_up(self, connection: socket.socket, message: Message) -> None:
        with self._lock:
            self._connection = connection
            self._given_up = False
        self.served_model = message
        self._up.set()
        self._first_start_ended.set()

    def _end(self) -> None:
        """End all processes of its group. They first get time to clean up, because nothing else would delete what they
        leave in shared memory."""
        with self._lock:
            process = self.process
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
            patience = time.monotonic() + END_S
            while time.monotonic() < patience:
                process.poll()  # reaps the process; otherwise it would remain as a zombie
                os.killpg(process.pid, 0)
                time.sleep(POLL_S)
            os.killpg(process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        """Its refusal, otherwise its last lines about an error, otherwise its last lines."""
        lines = [line for line in self._output_lines if line]
        refusals = [line.removeprefix("refused: ") for line in lines if line.startswith("refused: ")]
        error_lines = [line for line in lines if any(word in line.lower() for word in _ERROR_WORDS)]
        return (refusals[-1] if refusals else " | ".join((error_lines or lines)[-3:]))[:600]


def vllm_environ(environ: dict[str, str], threads: int) -> dict[str, str]:
    """The host's environment variables, without Kvasir's secrets and modules, and with all reporting to the outside
    turned off."""
    variables = {name: value for name, value in environ.items() if not name.startswith(("KVASIR_", "PYTHON"))}
    variables |= {"PYTHONPATH": str(_PATH), "PYTHONUNBUFFERED": "1"}
    variables |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    # vLLM must not bind its threads to cores, because other programs may have bound threads to the same cores.
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables | ({"OMP_NUM_THREADS": str(threads)} if threads else {})

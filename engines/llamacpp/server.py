"""Runs `llama-server` from PATH, with the options that a KV transfer needs. It is restarted if it dies or hangs, and
ends with this process.

This is needed if the prebuilt wheel has no build for the machine's GPU (a DGX Spark), or isn't installed. Options that
only some releases have are passed only if `--help` lists them.
"""

import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from engines.entry import closed_on_failure
from engines.llamacpp.http import PATIENCE_S, LlamaServer, socket_url
from engines.program import (
    END_S,
    FIRST_PAUSE_S,
    LAST_WORDS,
    LOAD_S,
    LONGEST_PAUSE_S,
    STEADY_S,
    ends_with_us,
    read_output,
)
from engines.waiting import POLL_S
from messages.errors import ConfigError, EngineUnavailable

_log = logging.getLogger(__name__)

PROGRAM = "llama-server"
_SOCKET = "server.sock"
_MAX_SOCKET_BYTES = 100  # maximum length of a socket's path; macOS allows 103 bytes, Linux 107
_ASK_S = 60.0  # llama-server can take seconds to list CUDA devices

# Settings of the servers that Kvasir starts. Each has the option of llama-server, then the name and the value of the
# same parameter in xllamacpp. An option is passed only if llama-server's --help lists it.
SETTINGS: tuple[tuple[tuple[str, ...], str, object], ...] = (
    # Without this, a restored slot is cleared when another slot starts.
    (("--no-kv-unified",), "kv_unified", False),
    # Without this, sliding-window layers drop rows that a restored slot needs, and the server computes the prompt
    # again.
    (("--swa-full",), "swa_full", True),
    # Without this, the server fills slots from its own prompt cache.
    (("--cache-ram", "0"), "cache_ram_mib", 0),
    # Without this, a recurrent model's slot file holds a state for each checkpoint.
    (("--ctx-checkpoints", "0"), "n_ctx_checkpoints", 0),
    (("--no-warmup",), "warmup", False),
    (("--no-webui",), "ui", False),
    (("--slots",), "endpoint_slots", True),
)
_KILL = 'kill -9 "$1"'
_GPUS = {"cuda": "cuda", "metal": "metal", "mtl": "metal", "rocm": "rocm", "vulkan": "vulkan", "sycl": "sycl"}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server loads. `tokens` is the context of all slots together."""

    weights: Path
    tokens: int
    slots: int
    slot_folder: Path  # of mode 0700
    threads: int = 0  # number of CPU threads; with 0, the server chooses
    architecture: str = ""  # the weights' architecture, for error messages
    health_s: float = PATIENCE_S  # a server that does not answer /health within this time is killed

    @property
    def socket(self) -> Path:
        """Where the server listens: in a folder that only this user can open, so no other user and no web page can
        reach it."""
        path = self.slot_folder / _SOCKET
        if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
            raise ConfigError(f"the path {self.slot_folder} is too long for a socket: set TMPDIR to a shorter path")
        return path

    @property
    def model(self) -> str:
        """The model for error messages. It includes the architecture, for which a release may be too old."""
        return f"{self.weights}" + (f", a {self.architecture!r} model" if self.architecture else "")


def find_program() -> str:
    """Path of llama-server, "" if PATH has none."""
    return shutil.which(PROGRAM) or ""


def arguments(launch: Launch, help_text: str) -> list[str]:
    """The command line after the program's name; `help_text` is what its `--help` prints."""
    words = ["--model", str(launch.weights), "--host", str(launch.socket)]
    words += ["--ctx-size", str(launch.tokens), "--parallel", str(launch.slots)]
    words += ["--slot-save-path", f"{launch.slot_folder}/"]
    # Without flash attention, V would be stored transposed. In older releases, --flash-attn is a switch. In newer ones,
    # it takes a value.
    words += ["--flash-attn", "on"] if re.search(r"--flash-attn\s+[\[<{]?on", help_text) else ["--flash-attn"]
    for option in (*(option for option, _, _ in SETTINGS), ("--no-context-shift",)):
        words += option if _has_option(help_text, option[0]) else ()
    if not _has_option(help_text, "--fit"):  # older releases compute on the CPU by default
        words += ["--n-gpu-layers", "999"]
    return words + (["--threads", str(launch.threads)] if launch.threads else [])


def device_in(listing: str) -> str:
    """The device from the output of `--list-devices`: the first GPU, otherwise "cpu"."""
    names = [name.lower() for name in re.findall(r"^\s*([A-Za-z]+)\d*: ", listing, re.MULTILINE)]
    return next((_GPUS[name] for name in names if name in _GPUS), "cpu")


class LlamaServerProcess:
    """One llama-server. While it is down, callers get EngineUnavailable, and jobs are tried again."""

    def __init__(self, program: str, launch: Launch) -> None:
        """Returns once the model is loaded. Raises ConfigError with the server's last output if it can't be loaded."""
        help_text = _output_of(program, "--help")
        if ".sock" not in help_text:  # a release without Unix sockets would read the path as a host name
            raise ConfigError(
                f"{program} can't listen on a Unix socket, which Kvasir needs to keep other users out: update llama.cpp"
            )
        self._socket = launch.socket
        self.server = LlamaServer(socket_url(self._socket))
        self.device = device_in(_output_of(program, "--list-devices"))
        self._command = [program, *arguments(launch, help_text)]
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._is_loaded = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._spawn()
        self._thread = threading.Thread(target=self._supervise, name=PROGRAM, daemon=True)
        self._thread.start()
        with closed_on_failure(self):
            self._wait_until_loaded(launch)
        self.server.watch(launch.health_s, self._kill)

    def close(self) -> None:
        """End it. Idempotent."""
        self._closing.set()
        self.server.close()
        with self._lock:
            process = self.process
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        self._thread.join()

    def _kill(self) -> None:
        """Kill a hung server. It is then restarted like one that died."""
        with self._lock:
            self.process.kill()

    def _spawn(self) -> bool:
        """Start the server. Returns False if it is no longer needed."""
        with self._lock:
            if self._closing.is_set():
                return False
            self._socket.unlink(missing_ok=True)  # a killed server leaves its socket, which would block the new one
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that only the worker handles Ctrl-C in the terminal
            )
            return True

    def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            start = time.monotonic()
            code = self._read_output()
            if self._closing.is_set() or not self._is_loaded.is_set():
                return
            pause_s = FIRST_PAUSE_S if time.monotonic() - start > STEADY_S else pause_s
            _log.warning(
                "%s ended with code %s, and is started again in %.0f s: %s", PROGRAM, code, pause_s, self._error_lines()
            )
            if self._closing.wait(pause_s) or not self._spawn():
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _read_output(self) -> int:
        process = self.process
        with ends_with_us(process.pid, _KILL):
            read_output(process, self._last_words, _log, PROGRAM)
            return process.wait()

    def _wait_until_loaded(self, launch: Launch) -> None:
        deadline = time.monotonic() + LOAD_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self.server.get("/health")
            except EngineUnavailable:
                self._thread.join(POLL_S)
                continue
            self._is_loaded.set()
            if self._thread.is_alive():  # if the thread has ended, the server died while it was loading
                return
        raise ConfigError(f"{PROGRAM} can't load {launch.model}: {self._error_lines() or 'it printed nothing'}")

    def _error_lines(self) -> str:
        """Its last output lines that mention an error, or otherwise its very last lines."""
        lines = [line for line in self._last_words if line]
        error_lines = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
        return " | ".join((error_lines or lines)[-3:])[:600]


def _output_of(program: str, question: str) -> str:
    try:
        completed_process = subprocess.run(
            [program, question],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} can't be run: {error}") from None
    return completed_process.stdout + completed_process.stderr


def _has_option(help_text: str, option: str) -> bool:
    return re.search(rf"{re.escape(option)}(?![\w-])", help_text) is not None

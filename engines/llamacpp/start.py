"""Gets a llama.cpp server: inside this process (xllamacpp), as a `llama-server` that Kvasir starts, or one that already
runs."""

import atexit
import fcntl
import importlib.util
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engines.entry import EngineOptions, closed_on_failure, options_in
from engines.llamacpp.gguf_file import GGUFFile, read_gguf
from engines.llamacpp.http import PATIENCE_S, LlamaServer, socket_url
from engines.llamacpp.model import heads
from engines.llamacpp.ollama_models import SCHEME, check_dialect, find_gguf
from engines.llamacpp.server import PROGRAM, SETTINGS, Launch, LlamaServerProcess, find_program
from engines.program import SHARED_MEMORY
from engines.template import require_bounded
from messages.errors import ConfigError, EngineUnavailable, KVTransferFailed

_OWN_PROGRAM = f"{PROGRAM}:"
_RunningServer = tuple[LlamaServer, str, Callable[[], None]]  # the server, its device, and a function that ends it
_SLOT_FOLDERS = "kvasir-slots-"
_NEW_S = 60.0  # a folder younger than this is kept, because its owner could still be about to lock it
_WHOLE_PROMPT = 8192  # a prompt of up to this many tokens is computed as one batch
_LONGEST_PATIENCE_S = 3600.0
_CONTEXT_STEP = 256  # llama.cpp rounds a slot's context up to a multiple of this


@dataclass
class Backing:
    """A running server and what is known about it. `slot_folder` is where it keeps slot files, if this process can
    reach that."""

    server: LlamaServer
    gguf: GGUFFile | None
    slot_folder: Path | None
    total_slots: int
    context: int
    device: str
    release: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """Release the server. A server in this process ends."""
        self.server.close()
        while self.release:
            self.release.pop()()


def start(options: EngineOptions) -> Backing:
    """Start a server for a GGUF file, with one slot more than `options.slots`, for prefill.

    The weights are a path, or `ollama:NAME` for a model that was pulled with Ollama. With the prefix `llama-server:`,
    or without the package xllamacpp, the server is the program llama-server on PATH; otherwise it runs in this process.
    The suffix `?health_s=10` sets how long the program may hang.

    Raises ConfigError if package and program or the file are missing, the file is damaged or in a dialect that
    llama.cpp doesn't read, or llama.cpp refuses it.
    """
    weights, _, patience = options.weights.partition("?health_s=")
    program = _program(weights.startswith(_OWN_PROGRAM))
    weights = weights.removeprefix(_OWN_PROGRAM)
    gguf = read_gguf(
        find_gguf(weights.removeprefix(SCHEME)) if weights.startswith(SCHEME) else Path(weights).expanduser()
    )
    check_dialect(gguf)
    require_bounded(str(gguf.metadata.get("tokenizer.chat_template", "")), (), str(gguf.path))
    context = options.context or int(gguf.hyperparameter("context_length", 4096))
    slots = options.slots + 1
    folder, remove_folder = make_slot_folder(_spacious_folder(gguf, context * slots))
    atexit.register(remove_folder)  # removes the slot files from memory even if the engine is never closed

    # A slot needs one position more than its prompt and answer.
    tokens = slots * (context // _CONTEXT_STEP + 1) * _CONTEXT_STEP
    launch = Launch(gguf.path, tokens, slots, folder, options.threads, gguf.architecture, _patience(patience))
    try:
        server, device, end = _run_program(program, launch) if program else _run_here(launch)
    except BaseException:
        remove_folder()
        raise
    return Backing(server, gguf, folder, slots, context, device, [remove_folder, end])


def make_slot_folder(parent: Path) -> tuple[Path, Callable[[], None]]:
    """A new folder for slot files in `parent`, and a function that removes it. Folders that killed processes left there
    are deleted first.

    Slot files contain students' texts and are in memory, and nothing else would delete them. A folder is locked as long
    as its process lives. Raises ConfigError if other users could replace it.
    """
    _require_unexchangeable(parent)
    for old_folder in parent.glob(f"{_SLOT_FOLDERS}*"):
        with suppress(OSError):  # the folder belongs to another user, is gone, or is locked
            if time.time() - old_folder.lstat().st_mtime > _NEW_S:
                lock = _lock(old_folder)
                shutil.rmtree(old_folder, ignore_errors=True)
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=_SLOT_FOLDERS, dir=parent))
    lock = -1
    # The lock protects the folder, because other processes delete it only if they can lock it. On a file system without
    # locks, no process can lock it, so a failure here is harmless.
    with suppress(OSError):
        lock = _lock(folder)

    def remove() -> None:
        nonlocal lock
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
            lock = -1

    return folder, remove


def _require_unexchangeable(parent: Path) -> None:
    for folder in (parent.resolve(), *parent.resolve().parents):
        found = folder.stat()
        open_to = found.st_mode & (stat.S_IWOTH if found.st_gid in (0, os.getgid()) else stat.S_IWOTH | stat.S_IWGRP)
        if found.st_uid not in (0, os.getuid()) or (open_to and not found.st_mode & stat.S_ISVTX):
            raise ConfigError(f"{parent} can't be used for KV caches, because other users can rename files in {folder}")


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock. Raises OSError if the lock is taken, or if the folder is not
    Kvasir's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _program(is_requested: bool) -> str:
    """The path of llama-server if the program should serve; "" for the package. Raises ConfigError if neither
    exists."""
    if not is_requested and importlib.util.find_spec("xllamacpp"):
        return ""
    program = find_program()
    if not program and is_requested:
        raise ConfigError(f"there is no {PROGRAM} on PATH: install llama.cpp, or remove {_OWN_PROGRAM!r} from weights")
    if not program:
        raise ConfigError(
            "the llamacpp engine needs the package 'xllamacpp' (pip install 'kvasir-inference[llamacpp]'), "
            f"or {PROGRAM} on PATH"
        )
    return program


def package_version() -> str:
    """The version of the package that provides a server in this process; "" if it isn't installed."""
    try:
        return version("xllamacpp")
    except PackageNotFoundError:
        return ""


def _run_program(program: str, launch: Launch) -> _RunningServer:
    process = LlamaServerProcess(program, launch)
    atexit.register(process.close)
    return process.server, process.device, process.close


def _run_here(launch: Launch) -> _RunningServer:
    import xllamacpp

    # The list holds the only reference, so clearing it ends the server.
    servers: list[Any] = []
    try:
        servers.append(xllamacpp.Server(_parameters(xllamacpp, launch)))
    except RuntimeError as error:
        raise ConfigError(f"llama.cpp can't load {launch.model}: {error}") from None
    server = LlamaServer(socket_url(launch.socket))
    # If the server is stopped before its loop is running, it hangs. An answer to this request shows that the loop is
    # running.
    server.get("/slots")
    return server, _device(xllamacpp), servers.clear


def attach(options: EngineOptions) -> Backing:
    """Attach to a running llama-server: `http://host:port?slots=FOLDER&model=FILE&health_s=10`, or `unix://SOCKET?…`.

    FOLDER is its --slot-save-path as seen from here. FILE is its GGUF file (by default the path that the server
    reports). If either can't be reached, no KV caches are transferred. Raises ConfigError if the server can't be
    reached.
    """
    parts = urlsplit(options.weights)
    settings = options_in(options.weights, parts.query, "slots", "model", "health_s")
    patience_s = _patience(settings.get("health_s", ""))
    server = LlamaServer(f"{parts.scheme}://{parts.netloc}{parts.path}")
    with closed_on_failure(server):
        try:
            properties = server.get("/props")
            context = int(properties["default_generation_settings"]["n_ctx"])
            slots = int(properties["total_slots"])
        except (EngineUnavailable, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no llama-server answers at {server.url}: {error}") from None
        if options.context > context:
            raise ConfigError(
                f"a slot of {server.url} holds only {context:,} tokens, fewer than the {options.context:,} requested: "
                "restart llama-server with a larger --ctx-size"
            )
        gguf = _reported_gguf(settings.get("model", ""), str(properties.get("model_path", "")))
    folder = Path(settings["slots"]) if "slots" in settings else None
    server.watch(patience_s)
    return Backing(server, gguf, folder, slots, options.context or context, "unknown")


def _patience(text: str) -> float:
    """How many seconds /health may stay unanswered before a server counts as hung."""
    try:
        patience_s = float(text or PATIENCE_S)
    except ValueError:
        patience_s = 0
    if not 0.1 <= patience_s <= _LONGEST_PATIENCE_S:
        raise ConfigError(
            f"health_s must be a number of seconds from 0.1 to {_LONGEST_PATIENCE_S:,.0f}, not {text!r:.40}"
        )
    return patience_s


def _reported_gguf(path: str, reported_path: str) -> GGUFFile | None:
    if path:
        return read_gguf(Path(path).expanduser())
    try:
        return read_gguf(Path(reported_path)) if reported_path else None
    except ConfigError:  # the path may be on another machine, where the server runs
        return None


def _parameters(xllamacpp: Any, launch: Launch) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = str(launch.weights)
    params.n_ctx = launch.tokens
    params.n_parallel = launch.slots
    for _, name, value in SETTINGS:
        setattr(params, name, value)
    # Without flash attention, V would be stored transposed.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.slot_save_path = f"{launch.slot_folder}{os.sep}"
    if hasattr(params, "hostnames"):
        params.hostnames = [str(launch.socket)]
    else:  # before 2026.10
        params.hostname = str(launch.socket)
    params.verbosity = -1
    # ggml's threads wait for each other in a busy loop, which makes them fifty times slower on busy cores. So only half
    # of the logical CPUs are used. If each core has two hardware threads, that makes one thread per core. Otherwise,
    # half of the cores stay free for other programs.
    threads = launch.threads or max(1, (os.cpu_count() or 2) // 2)
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    if launch.threads == 1:
        # The whole prompt is computed as one batch, so that the answers of two runs can be compared. Otherwise the
        # server would split the prompt at places that depend on what else it decodes, and attention rounds differently
        # in batches of fewer than 64 tokens.
        params.n_batch = params.n_ubatch = _WHOLE_PROMPT
    return params


def _spacious_folder(gguf: GGUFFile, tokens: int) -> Path:
    """Shared memory if slot files of `tokens` positions fit there twice, otherwise the system's temporary folder."""
    try:
        sizes = heads(gguf)
    except KVTransferFailed:
        return Path(tempfile.gettempdir())
    bytes_needed = 2 * tokens * sizes.layers * 2 * sizes.kv_heads * sizes.head_dim * 2
    has_space = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > bytes_needed
    return SHARED_MEMORY if has_space else Path(tempfile.gettempdir())


def _device(xllamacpp: Any) -> str:
    """The device that llama.cpp offloads to: by default it uses a GPU whenever it has one."""
    for device in xllamacpp.get_device_info():
        if "GPU" in str(device["type"]):
            name = str(device["name"]).lower()
            return "metal" if name.startswith(("metal", "mtl")) else name.rstrip("0123456789")
    return "cpu"

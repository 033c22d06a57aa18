"""Whether the machine has memory for one more prompt's KV cache, if its worker must leave some free.

Where the GPU shares the machine's memory, one prompt too many does not end a process: the whole machine stops
answering. So such a prompt is left to another worker, and this one pauses itself until enough memory is free. If no
other worker takes such jobs, they are done here anyway.
"""

import logging
import math
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefill_worker.admission import NoCapacity

log = logging.getLogger(__name__)

_MEMINFO = Path("/proc/meminfo")


class FreeMemory:
    """Watches the machine's memory for one prefill worker. Thread-safe.

    Args:
        least_bytes: memory that must stay available beside all KV caches; 0: it is not checked.
        others_serve: whether another worker takes such jobs now.
        available: returns the machine's available bytes.
    """

    def __init__(
        self, least_bytes: int, others_serve: Callable[[], bool], available: Callable[[], float] | None = None
    ) -> None:
        self._least_bytes = least_bytes
        self._others_serve = others_serve
        self._available = available or available_bytes
        # KV bytes that the last refused job needed; 0 while this worker takes jobs.
        self._refused_bytes = 0
        # KV bytes of the prompts in prefill, whether or not the engine has allocated this memory yet.
        self._reserved_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes for a prompt, for the length of the block.

        Raises NoCapacity if the prompt would leave too little memory and another worker takes jobs.
        """
        with self._lock:
            fits = self._fits(size)
            self._reserved_bytes += size
        try:
            if not fits and self._others_serve():
                self._refused_bytes = size
                log.warning("paused: %s", self.why_short())
                raise NoCapacity(self.why_short())
            yield
        finally:
            with self._lock:
                self._reserved_bytes -= size

    def why_short(self) -> str:
        """Return why other workers should take prompts, as a sentence; "" if this worker has enough memory."""
        return (
            f"a KV cache of {self._refused_bytes / 1e9:.2f} GB would leave less than {self._least_bytes / 1e9:g} GB of "
            "this machine's memory free"
            if self._refused_bytes
            else ""
        )

    def look_again(self) -> None:
        """After a refusal, take jobs again if such a prompt would fit now, or if no other worker takes it."""
        if self._refused_bytes and (self._fits(self._refused_bytes) or not self._others_serve()):
            self._refused_bytes = 0

    def _fits(self, size: int) -> bool:
        return not self._least_bytes or self._available() >= self._least_bytes + self._reserved_bytes + size


def available_bytes() -> float:
    """Return what programs can still allocate without swapping; infinite if the system doesn't say.

    On Linux it is MemAvailable of /proc/meminfo (proc_meminfo(5)), which on a machine with unified memory is also what
    the GPU can get. On macOS it is the free, speculative and inactive pages of vm_stat(1).
    """
    if _MEMINFO.exists():
        found = re.search(r"^MemAvailable: +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else math.inf
    with suppress(OSError, subprocess.SubprocessError):
        return bytes_of_vm_stat(subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5).stdout)
    return math.inf


def bytes_of_vm_stat(text: str) -> float:
    """Return the available bytes in the output of vm_stat; infinite if the output has another form."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|speculative|inactive): +(\d+)\.$", text, re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and len(pages) == 3 else math.inf

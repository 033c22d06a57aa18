"""Whether the machine has memory for one more prompt's KV cache, for workers that must leave some memory free.

If the GPU shares the machine's memory, one prompt too many does not just end a process: the whole machine stops
responding. So such a prompt is left to another worker, and this worker pauses itself until memory is free again. If no
other worker takes jobs, this one computes the prompt anyway.
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
    """Watches the memory of one prefill worker's machine. Thread-safe.

    Args:
        least_bytes: must stay available beside all KV caches; 0: memory is not watched.
        others_serve: whether another worker takes this model's jobs now.
        available: the machine's available bytes.
    """

    def __init__(
        self, least_bytes: int, others_serve: Callable[[], bool], available: Callable[[], float] | None = None
    ) -> None:
        self._least_bytes = least_bytes
        self._others_serve = others_serve
        self._available = available or available_bytes
        self._refused_bytes = 0  # KV bytes of the last job that did not fit; 0: this worker takes jobs
        self._reserved_bytes = 0  # KV bytes of prompts under way, whether the engine has allocated them yet or not
        self._lock = threading.Lock()

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """A prompt of `size` bytes is under way during the block.

        Raises NoCapacity if it would leave too little memory and another worker takes jobs.
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
        """Why this worker takes no prompts for lack of memory, in a sentence; "": it takes them."""
        return (
            f"a KV cache of {self._refused_bytes / 1e9:.2f} GB would leave less than {self._least_bytes / 1e9:g} GB of "
            "this machine's memory free"
            if self._refused_bytes
            else ""
        )

    def look_again(self) -> None:
        """After a refusal: take jobs again if such a prompt would fit now, or if no other worker takes it."""
        if self._refused_bytes and (self._fits(self._refused_bytes) or not self._others_serve()):
            self._refused_bytes = 0

    def _fits(self, size: int) -> bool:
        return not self._least_bytes or self._available() >= self._least_bytes + self._reserved_bytes + size


def available_bytes() -> float:
    """Bytes that programs can still allocate without swapping; infinite if the system does not say.

    Linux: MemAvailable in /proc/meminfo (proc_meminfo(5)). On a machine with unified memory the GPU can use no more
    than this either. macOS: the free, speculative and inactive pages in vm_stat(1).
    """
    if _MEMINFO.exists():
        found = re.search(r"^MemAvailable: +(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else math.inf
    with suppress(OSError, subprocess.SubprocessError):
        return bytes_of_vm_stat(subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5).stdout)
    return math.inf


def bytes_of_vm_stat(text: str) -> float:
    """The available bytes in vm_stat's output; infinite if its output has another form."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|speculative|inactive): +(\d+)\.$", text, re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and len(pages) == 3 else math.inf

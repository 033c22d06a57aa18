"""What the benchmarks share: arguments, services, fresh processes, and the line of JSON at the end.

options = harness.options(__doc__)
with harness.store() as url:
    rounds = [harness.fresh_process("benchmarks.kvstore", "--way", "raw", store_url=url) for _ in range(9)]
harness.finish(seconds=...)
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.redis.client import open_client
from tests.support import services

_SIMULATED = "kv*:sim-*"
CHILD_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """What every benchmark is told. `quick`: every key, not every row, within 45 seconds on two cores."""

    quick: bool
    seed: int


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of every benchmark; add your own before parsing."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="every key, not every row; at most 45 seconds")
    made.add_argument("--seed", type=int, default=0, help="for all that is random (default: %(default)s)")
    return made


def options(description: str | None, arguments: Sequence[str] | None = None) -> BenchmarkOptions:
    """Parse the command line of a benchmark that takes no arguments of its own."""
    parsed = parser(description).parse_args(arguments)
    return BenchmarkOptions(parsed.quick, parsed.seed)


@contextmanager
def pair() -> Iterator[services.Pair]:
    """A broker and a store: those of KVASIR_TEST_*_URL, else private ones for the length of the block.

    A class's shared KV blocks outlive it in the store, by design; those of simulated engines are deleted at the end.
    """
    with services.services() as found:
        client: Any = open_client(found.store_url)
        before = set(client.scan_iter(_SIMULATED))
        yield found
        left = set(client.scan_iter(_SIMULATED)) - before
        if left:
            client.delete(*left)


def store() -> AbstractContextManager[str]:
    """The URL of a Redis: KVASIR_TEST_STORE_URL, else a private one for the length of the block."""
    return services.store()


def fresh_process(
    module: str,
    *arguments: str,
    store_url: str = "",
    broker_url: str = "",
    timeout_s: float = CHILD_TIMEOUT_S,
    packages: str = "",
) -> dict[str, Any]:
    """Run a module in a Python of its own and return the JSON object that it prints last.

    URLs travel in the environment: a command line is everybody's to read, and they hold passwords. `packages`: a folder
    whose packages go before all others.
    """
    urls = {services.STORE_VARIABLE: store_url, services.BROKER_VARIABLE: broker_url}
    if packages:
        urls["PYTHONPATH"] = os.pathsep.join((packages, os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {name: url for name, url in urls.items() if url},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return last_object(done.stdout)


def last_object(output: str) -> dict[str, Any]:
    """The JSON object in the last line of a benchmark's output."""
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def machine() -> str:
    """Where the figures come from, and how busy it was: a figure without that says little."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{load}, Python {platform.python_version()}"


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """A process of this machine, and the processor seconds that it has used."""

    pid: int
    name: str  # of its program, without its folder
    session: int
    cpu_s: float


def processes() -> Iterator[ProcessTime]:
    """All processes of this machine (Linux, proc(5))."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            head, _, tail = path.read_text().rpartition(")")
            fields = tail.split()
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            yield ProcessTime(int(path.parent.name), head.partition("(")[2], int(fields[3]), seconds)


def peak_growth(action: Callable[[], object]) -> int | None:
    """How far the most memory that this process held while `action` ran lies above what it held before."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present (Linux, proc(5))
    except OSError:
        return None
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def finish(**figures: object) -> None:
    """Print the last line: one JSON object. Floats are cut to four significant digits; nan has no place in JSON."""
    print(json.dumps(_rounded(figures), allow_nan=False), flush=True)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value

"""`python -m tests.support.one_job`: grades a file here, and prints which functions of docs/explanation/one_job.md ran.

As a JSON list of [file, name], in the order of their first calls (of a function in two rows, its first two), and after
it the names of the types of that page of which it made one. In a process of its own: every thread is watched from its
start, and what other tests left running would be watched as well.
"""

import faulthandler
import importlib
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from kvasir import cli

ROOT = Path(__file__).parents[2]
_PAGE = ROOT / "docs/explanation/one_job.md"
_ROW = re.compile(r"\| (\d+) \| [^|]+ \| `([\w/]+\.py)` \| `([\w.]+)` \|")
_TYPE = re.compile(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", re.MULTILINE)


def steps() -> list[tuple[str, str]]:
    """The page's rows: file and function."""
    rows = _ROW.findall(_PAGE.read_text("utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [(file, name) for _, file, name in rows]


def types() -> list[type]:
    """The types that a job passes, in the page's order, each found where the page says that it is defined."""
    found = []
    for name, file in _TYPE.findall(_PAGE.read_text("utf-8")):
        found.append(getattr(_module(file), name))
        assert found[-1].__module__ == _module(file).__name__, f"{name} is not defined in {file}"
    return found


def _module(file: str) -> Any:
    assert (ROOT / file).is_file(), f"docs/explanation/one_job.md names {file}, which does not exist"
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def _code_of(file: str, name: str) -> CodeType:
    target: Any = _module(file)
    for part in name.split("."):
        target = getattr(target, part)
    code = target.__code__
    assert Path(code.co_filename).resolve() == (ROOT / file).resolve(), f"{name} is not defined in {file}"
    return code


@contextmanager
def _first_calls(codes: Iterable[CodeType]) -> Iterator[list[CodeType]]:
    """Notes of each code as many calls as it is there."""
    first_calls: list[CodeType] = []
    counts = Counter(codes)

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and first_calls.count(frame.f_code) < counts[frame.f_code]:
            first_calls.append(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield first_calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main(arguments: list[str]) -> None:
    """Grade as `kvasir grade` does with these arguments."""
    faulthandler.enable()
    functions = steps()
    codes = [_code_of(file, name) for file, name in functions]
    names_by_code = {kind.__init__.__code__: kind.__name__ for kind in types()}  # type: ignore[misc]
    # The start-up proof uses the engine too; only the job itself is to be seen.
    importlib.import_module("kvasir.connect").prove = lambda _prefill, _decode: ""  # type: ignore[attr-defined]
    with _first_calls([*codes, *names_by_code]) as first_calls:
        # Not the exit code: what so small a model writes may be of no use as a grade, and is a result all the same.
        cli.run_command(["--config", str(ROOT / "examples/demo.toml"), "grade", *arguments])
    called = [functions[codes.index(code)] for code in first_calls if code in codes]
    made = [names_by_code[code] for code in first_calls if code in names_by_code]
    sys.stdout.write("\n" + json.dumps([called, made]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

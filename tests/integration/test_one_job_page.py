"""docs/one_job.md is true: every function it names exists, and one real job calls them in its order."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from kvasir import cli

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| (\d+) \| [^|]+ \| `([\w/]+\.py)` \| `([\w.]+)` \|")


def steps() -> list[tuple[str, str]]:
    rows = ROW.findall((ROOT / "docs/one_job.md").read_text("utf-8"))
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    return [(file, name) for _, file, name in rows]


def code_of(file: str, name: str) -> CodeType:
    assert (ROOT / file).is_file(), f"docs/one_job.md names {file}, which does not exist"
    found: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)
    code = found.__code__
    assert Path(code.co_filename).resolve() == (ROOT / file).resolve(), f"{name} is not defined in {file}"
    return code


@contextmanager
def first_calls(codes: set[CodeType]) -> Iterator[list[CodeType]]:
    """Which of these functions were called for the first time when, in all threads."""
    seen: list[CodeType] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in codes and frame.f_code not in seen:
            seen.append(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_one_real_job_calls_the_functions_of_the_page_in_its_order(tmp_path, monkeypatch):
    named = steps()
    codes = [code_of(file, name) for file, name in named]
    (tmp_path / "rubric.yaml").write_text(
        "title: T\ncriteria:\n  - {id: a, title: A, points: 2, guidance: g, model: code}\n"
    )
    (tmp_path / "ada.R").write_text("x <- mean(orders$amount)\n" * 5)
    monkeypatch.chdir(tmp_path)
    # The start-up proof uses the engine too; only the job itself is to be seen.
    monkeypatch.setattr("kvasir.pipeline.prove", lambda _prefill, _decode: "")

    with first_calls(set(codes)) as seen:
        cli.run(["--config", str(ROOT / "examples/demo.toml"), "grade", "ada.R", "--rubric", "rubric.yaml"])

    # Not the exit code: what so small a model writes may be of no use as a grade, and is a result all the same.
    (journal,) = tmp_path.glob("results/*/results.jsonl")
    assert [json.loads(line)["state"] for line in journal.read_text("utf-8").splitlines()] == ["succeeded"]
    order = [named[codes.index(code)] for code in seen]
    assert order == named

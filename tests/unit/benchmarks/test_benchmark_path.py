"""`benchmarks.path` counts what it says, and what one job runs through does not grow unnoticed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, path

ALLOWED = 1.05
KEPT = ("functions", "files", "lines")


def grown(kept: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What has more than is allowed, for people."""
    return [
        f"{group}: {found[group][key]:,} {key}, kept are {kept[group][key]:,}"
        for group in path.GROUPS
        for key in KEPT
        if found[group][key] > ALLOWED * kept[group][key]
    ]


@pytest.fixture(scope="module")
def listed() -> str:
    # In a process of its own: a function whose answer is cached already would not be called.
    command = [sys.executable, "-m", "benchmarks.path", "--json", "--no-statements", "--list"]
    return subprocess.run(command, capture_output=True, text=True, timeout=harness.CHILD_TIMEOUT_S, check=True).stdout


@pytest.fixture(scope="module")
def figures(listed: str) -> dict[str, Any]:
    return harness.last_object(listed)


def test_what_one_job_runs_through_does_not_grow(figures: dict[str, Any]) -> None:
    kept = json.loads(path.FIGURES.read_text("utf-8"))

    assert grown(kept, figures) == [], "if that is meant: python -m benchmarks.path --keep"


def test_the_page_about_one_job_names_every_function_on_its_way(listed: str) -> None:
    page = path.PAGE.read_text("utf-8").partition(path.LISTED)[2]
    named = {
        (file, name)
        for file, names in re.findall(r"^- `([\w/.]+)`: (.+)$", page, re.MULTILINE)
        for name in re.findall(r"`([\w.]+)`", names)
    }
    found = set(re.findall(r"  ([\w/.]+):\d+ ([\w.]+)$", listed, re.MULTILINE))

    # A few run now and then only, as threads happen to meet.
    assert len(found) > 50
    assert len(found - named) <= (ALLOWED - 1) * len(found), f"python -m benchmarks.path --keep: {found - named}"


def test_the_groups_contain_each_other_and_each_stage_has_its_part(figures: dict[str, Any]) -> None:
    spine, executed = figures["spine"], figures["executed"]
    for key in path.KEYS:
        assert 0 < spine[key] < executed[key]
        for stage in path.STAGES:
            assert 0 < spine[stage][key] <= executed[stage][key] < executed[key]
    for part in ("adapters", "engines"):
        assert executed[part]["functions"] > 0


def test_a_twentieth_more_is_allowed() -> None:
    kept = {group: {"functions": 200, "files": 20, "lines": 1000} for group in path.GROUPS}
    at_most = {group: {"functions": 210, "files": 21, "lines": 1050} for group in path.GROUPS}
    assert grown(kept, at_most) == []

    at_most["spine"]["files"] = 22
    at_most["executed"]["lines"] = 1051
    assert grown(kept, at_most) == ["spine: 22 files, kept are 20", "executed: 1,051 lines, kept are 1,000"]


def test_lines_are_those_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "ROOT", tmp_path)
    source = '''\
"""A module."""


class Kettle:
    """A class."""

    @property
    def hot(
        self,
    ) -> bool:
        """Whether it
        boils."""

        # A comment.
        def inner():
            """Within."""
            return 1

        return inner()  # another
'''
    (tmp_path / "kettle.py").write_text(source)

    ((first, last, hot),) = path.functions(tmp_path / "kettle.py")

    assert (first, last) == (7, 19)
    assert hot == path.Function("kettle.py", "Kettle.hot", 8, 6)


def test_statements_are_counted_at_every_depth_and_docstrings_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path, "ROOT", tmp_path)
    source = '''\
"""A module."""
try:
    match 1:
        case 1:
            x = 1
        case _:
            pass
except ValueError:
    x = [n for n in (1, 2)]
else:

    def f():
        """A function."""
        return 1
finally:
    del x
'''
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text(source)

    assert path.statements("room") == 8


def test_only_turns_that_take_a_step_count() -> None:
    run, look, take, prepare = (path.Function("infra/x.py", name, 1, 1) for name in ("run", "look", "take", "prepare"))
    top = path.Call(None, None, 0)
    loop = path.Call(run, top, 1)
    top.calls.append(loop)
    # Prepared, looked in vain; looking when the job began (5), which it found and took; looked again, and ended (12).
    for function, began, ended in ((prepare, 2, 2), (look, 3, 3), (look, 4, 6), (take, 7, 8), (look, 9, 10)):
        loop.calls.append(path.Call(function, loop, began, ended))
    job = path.TracedJob(path.Trace(), began=5, ended=12)

    assert [call.began for call in path.job_calls(job, top, {take})] == [1, 4, 7]
    assert path.job_calls(job, top, {path.Function("infra/x.py", "other", 1, 1)}) == []

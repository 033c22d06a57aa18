"""What today's program writes and says is what release 0.1.0 wrote and said."""

from __future__ import annotations

import dataclasses
import difflib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from messages import codec
from tests.forms.record import GIVEN, RELEASE
from tests.support import services
from tests.support.processes import ROOT, environment
from tests.unit.messages.golden.make import FOLDER, MESSAGES


def files_in(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.parts[0] not in GIVEN)


FILES = files_in(RELEASE)


@dataclasses.dataclass(frozen=True)
class Today:
    """What was recorded now, and why some of it was not."""

    folder: Path
    problem: str


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory, store_url: str) -> Today:
    """Everything, recorded again."""
    folder = tmp_path_factory.mktemp("today")
    command = [sys.executable, "-m", "tests.forms.record", str(folder)]
    environ = environment(folder.parent) | {services.STORE_VARIABLE: store_url, "FORCE_COLOR": ""}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    return Today(folder, "" if done.returncode == 0 else done.stderr)


@pytest.mark.parametrize("name", FILES)
def test_a_form_is_what_it_was(name: str, today: Today) -> None:
    before, now = (folder / name for folder in (RELEASE, today.folder))
    if not now.is_file():
        pytest.fail(f"it is not written any more\n{today.problem}", pytrace=False)
    if before.read_bytes() != now.read_bytes():
        then, lines = (path.read_text("utf-8").splitlines() for path in (before, now))
        changed = difflib.unified_diff(then, lines, "release 0.1.0", "today", n=2, lineterm="")
        pytest.fail("\n".join(changed), pytrace=False)


def test_no_file_is_written_that_was_not(today: Today) -> None:
    assert today.problem == ""
    assert files_in(today.folder) == FILES


# --- messages


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_sent_byte_for_byte_as_it_was(name: str) -> None:
    body, before = codec.encode(MESSAGES[name]), (FOLDER / f"{name}.msgpack").read_bytes()
    assert msgpack.unpackb(body) == msgpack.unpackb(before)
    assert body == before


def instances(value: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from instances(getattr(value, field.name))
    elif isinstance(value, tuple):
        for each in value:
            yield from instances(each)


def is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return bool(value == made)


def test_every_field_of_every_message_is_in_a_golden_one() -> None:
    found = [each for message in MESSAGES.values() for each in instances(message)]
    every = {(type(each).__name__, field.name) for each in found for field in dataclasses.fields(each)}
    stated = {
        (type(each).__name__, field.name)
        for each in found
        for field in dataclasses.fields(each)
        if not is_default(field, getattr(each, field.name))
    }
    assert every - stated == {("WorkerInfo", "details")}  # which never travel in a card: see test_registrations.py
    kinds = {msgpack.unpackb(path.read_bytes())["kind"] for path in FOLDER.glob("*.msgpack")}
    assert kinds == {"prefill", "decode", "result", "token", "card", "details"}

"""What today's program writes and says is what release 0.1.0 wrote and said."""

import dataclasses
import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
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


# Forms that got more since then, as they are now; `release_0_1_0` stays as it was.
SINCE = RELEASE.with_name("since_0_1_0")
# What of the release is not said any more, and why.
GONE = {
    "gateway.json/routes/POST /v1/chat/completions/body/messages*/0/content*": "the assistant's may be missing",
    "gateway.json/routes/POST /v1/chat/completions/body/user": "ignored before it is read, whatever it is",
    "gateway.json/routes/POST /v1/completions/body/user": "the same",
    "gateway.json/routes/POST /api/chat/body/messages/0/content*": "the assistant's may be missing",
    "gateway.json/exchanges/3/body/error/message": "it names the page of the routes, which has moved",
    "gateway.json/exchanges/27/body/error/message": "a function without a name is told from one that is not forced",
    "gateway.json/exchanges/27/body/error/code": "the same",
    "gateway.json/exchanges/29/body/choices/0/text": "a completion continues its prompt, without a template",
    "gateway.json/exchanges/29/body/usage/prompt_tokens": "the same",
    "gateway.json/exchanges/29/body/usage/total_tokens": "the same",
    "names.json/kvasir/Client/submit": "it takes one argument more, which may be left out",
}


def gone(then: Any, now: Any, place: str) -> Iterator[str]:
    """Where `now` doesn't say what `then` said: it may say more, as lists and at the end of texts."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name, value in then.items():
            yield from gone(value, now[name], f"{place}/{name}") if name in now else [f"{place}/{name}"]
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for number, (one, other) in enumerate(zip(then, now, strict=True)):
            yield from gone(one, other, f"{place}/{number}")
    elif isinstance(now, list):
        if not all(each in now for each in (then if isinstance(then, list) else [then])):
            yield place
    elif then != now and not (isinstance(then, str) and isinstance(now, str) and now.startswith(then)):
        yield place


def test_what_is_more_since_the_release_leaves_what_there_was() -> None:
    found = [
        place
        for path in sorted(SINCE.glob("*.json"))
        for place in gone(json.loads((RELEASE / path.name).read_text()), json.loads(path.read_text()), path.name)
    ]
    assert sorted(found) == sorted(GONE)


def commands(path: Path) -> Any:
    """The commands, with parameters by their names and choices as lists, so that either may get more.

    Without help and examples, which are read by people alone and may be said better.
    """

    def shaped(each: dict[str, Any]) -> dict[str, Any]:
        shape = {name: value for name, value in each.items() if name not in ("help", "epilog")}
        if "parameters" in shape:
            shape["parameters"] = {str(one.get("options", one.get("argument"))): one for one in shape["parameters"]}
        if str(shape.get("type")).startswith("one of "):
            shape["type"] = shape["type"].removeprefix("one of ").split(", ")
        return shape

    return json.loads(path.read_text("utf-8"), object_hook=shaped)


@pytest.mark.parametrize("name", FILES)
def test_a_form_is_what_it_was(name: str, today: Today) -> None:
    before = SINCE / name if (SINCE / name).is_file() else RELEASE / name
    now = today.folder / name
    if not now.is_file():
        pytest.fail(f"it is not written any more\n{today.problem}", pytrace=False)
    if name == "commands.json":
        assert list(gone(commands(before), commands(now), name)) == []
    elif before.read_bytes() != now.read_bytes():
        then, lines = (path.read_text("utf-8").splitlines() for path in (before, now))
        changed = difflib.unified_diff(then, lines, "release 0.1.0", "today", n=2, lineterm="")
        pytest.fail("\n".join(changed), pytrace=False)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda export: export["parameters"]["['--format']"]["type"].append("pass-fail"), ""),
        (lambda export: export["parameters"].update({"['--pass-mark']": {"type": "text"}}), ""),
        (lambda export: export["parameters"]["['--format']"]["type"].remove("csv"), "['--format']/type"),
        (lambda export: export["parameters"].pop("['--scale']"), "['--scale']"),
    ],
    ids=["a choice more", "an option more", "a choice less", "an option less"],
)
def test_a_command_may_get_more_and_lose_nothing(change: Callable[[Any], None], place: str) -> None:
    then, now = commands(RELEASE / "commands.json"), commands(RELEASE / "commands.json")
    change(now["kvasir export"])
    assert list(gone(then, now, "")) == ([f"/kvasir export/parameters/{place}"] if place else [])


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

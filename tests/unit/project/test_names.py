"""`make lint` refuses names that say nothing, a class name given twice, and a folder named like another one."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import names

MANY = "\n".join(f"def f{number}(given):\n    found = given" for number in range(3))


def write_module(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, "utf-8")


def vague_names(root: Path, text: str, reasons: dict[str, str] | None = None) -> list[str]:
    write_module(root, "kvasir/words.py", text)
    count = names.count_names("kvasir", names.read_modules(root, "kvasir"), names.Exceptions(reasons or {}))
    return [f"{definition.kind} {definition.name}" for definition in count.vague]


@pytest.mark.parametrize(
    ("text", "vague"),
    [
        ("found = 1", ["global found"]),
        ("_FOUND = 1", ["global _FOUND"]),
        ("import json as what", ["import-alias what"]),
        ("def given(): ...", ["function given"]),
        ("def f(given, *others, why=1, **rest): ...", ["param given", "param others", "param why"]),
        ("def f():\n    for one, (index, each) in []: ...", ["loop one", "loop each"]),
        ("def f():\n    with open('a') as opened: ...", ["local opened"]),
        ("def f():\n    return [made for made in []]", ["loop made"]),
        ("def f():\n    if (found := 1): ...", ["local found"]),
        ("f = lambda each: each", ["param each"]),
        ("try: ...\nexcept OSError as why: ...", ["local why"]),
        ("match 1:\n    case [*others]: ...\n    case what: ...", ["local others", "local what"]),
        ("class Asked:\n    done: int\n    def kept(self):\n        self._left = 1", None),
        ("class NotFound: ...\nclass ServerFailed: ...", []),
        ("def f(unread, unsaved_changes, is_saved, seed, feed, speed): ...", ["param unread"]),
        ("items.found = 1; print(found)", []),
    ],
)
def test_a_vague_name_is_seen(text: str, vague: list[str] | None, tmp_path: Path) -> None:
    if vague is None:
        vague = ["class Asked", "class-attribute done", "method kept", "attribute _left"]
    assert vague_names(tmp_path, text) == vague


@pytest.mark.parametrize(
    "text",
    [
        "def f(before, after): ...",
        "def f():\n    left, right = 1, 2",
        "class Buffer:\n    def read(self): ...",
        "__all__ = []",
        "class Step(StrEnum):\n    FAILED = 'failed'",
        "@main.command()\n@click.option('--only', '-o')\ndef again(only): ...",
        "class Info:\n    done: int\n    def __init__(self):\n        self.done = 1",
    ],
)
def test_an_exception_is_taken_out_of_both_counts(text: str, tmp_path: Path) -> None:
    exceptions = names.Exceptions({"Info.done": "written in the registration"})
    write_module(tmp_path, "kvasir/words.py", text)
    write_module(tmp_path, "messages/words.py", text.replace("before", "before2").replace("after", "after2"))
    count = names.count_names("kvasir", names.read_modules(tmp_path, "kvasir"), exceptions)
    assert count.vague == []
    [module] = names.read_modules(tmp_path, "kvasir")
    assert count.total < len(module.definitions)


def test_one_of_a_pair_alone_is_vague(tmp_path: Path) -> None:
    assert vague_names(tmp_path, "def f(before): ...\ndef g(after): ...") == ["param before", "param after"]
    assert vague_names(tmp_path, "def f():\n    read = left = 1") == ["local read", "local left"]


def test_a_room_fails_by_percent_and_count_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(tmp_path, "kvasir/words.py", MANY)
    assert names.check(tmp_path, names.Exceptions({})) == 1
    assert "kvasir: 6/9 66.7 %" in capsys.readouterr().out

    write_module(tmp_path, "kvasir/words.py", MANY.replace("found", "path", 1))
    assert names.check(tmp_path, names.Exceptions({})) == 0

    write_module(tmp_path, "kvasir/words.py", MANY + "\n" + "\n".join(f"item_{number} = 1" for number in range(591)))
    assert names.check(tmp_path, names.Exceptions({})) == 0
    assert "kvasir: 6/600 1.0 %" in capsys.readouterr().out


def test_an_exception_that_covers_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names.check(tmp_path, names.Exceptions({"words:Info.done": "written"})) == 1
    assert "the exception words:Info.done covers nothing" in capsys.readouterr().out


def test_a_class_name_of_two_rooms_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(tmp_path, "kvasir/a.py", "class Part: ...")
    write_module(tmp_path, "benchmarks/b.py", "class Part: ...")
    assert names.check(tmp_path, names.Exceptions({})) == 0
    assert "  Part: benchmarks/b.py, kvasir/a.py" in capsys.readouterr().out

    write_module(tmp_path, "engines/c.py", "class Part: ...")
    assert names.check(tmp_path, names.Exceptions({})) == 1
    assert "names: class Part in engines/c.py, kvasir/a.py" in capsys.readouterr().out


def test_a_second_desk_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(tmp_path, "kvasir/desk/__init__.py", "")
    write_module(tmp_path, "tests/support/desk.py", "")
    assert names.check(tmp_path, names.Exceptions({})) == 0
    write_module(tmp_path, "producers/desk.py", "")
    assert names.check(tmp_path, names.Exceptions({})) == 1
    assert "names: desk in kvasir/desk, producers/desk.py" in capsys.readouterr().out


def test_the_list_says_where_a_name_is(tmp_path: Path) -> None:
    write_module(tmp_path, "kvasir/a.py", "class Page:\n    async def show(self):\n        naïve, found = 1, 2\n")
    listing = CliRunner().invoke(names.main, ["--list", "--root", str(tmp_path), "kvasir"])
    assert listing.output == "kvasir/a.py:3 local found Page.show\n"

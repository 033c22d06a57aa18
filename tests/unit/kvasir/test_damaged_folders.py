"""A batch's folder may be damaged, or come from anywhere: every command says one sentence about it, and what to do."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from desk.assignments import Inputs, find_folders, read_inputs, save_inputs
from desk.decisions import Decisions
from desk.rounds import versions
from desk.view import BatchView
from grading.reviews import Override, append_override
from infra.config.settings import load_settings
from kvasir import cli
from kvasir.commands.top_batches import find_batches
from kvasir.desk_app.configuration import DeskBackend
from messages.errors import KvasirError
from producers.batch.batch import Batch
from tests.support.desk import answer, plan_tiny_class
from tests.support.processes import SIMULATED_MODEL, config_text

RUN = ["--quiet"]
TWO = ["--code-model", "coder", "--feedback-model", "writer"]
COMMANDS = {
    "results": ["results", "out"],
    "results as JSON": ["results", "out", "--json"],
    "watch": ["watch", "out", *RUN],
    "retry": ["retry", "out", *RUN],
    "grade": ["grade", "class/submissions", "--rubric", "class/rubric.yaml", "--out", "out", *TWO, *RUN],
    "run": ["run", "prompts.jsonl", "--model", "coder", "--out", "out", *RUN],
    "export csv": ["export", "out", "--format", "csv", "--to", "made"],
    "export canvas": ["export", "out", "--format", "canvas", "--assignment", "H (1)", "--to", "made"],
    "export feedback": ["export", "out", "--format", "feedback", "--to", "made"],
    "export Moodle feedback": ["export", "out", "--format", "moodle-feedback", "--to", "made"],
    "forget": ["forget", "out", "--yes"],
}
DESK = "desk and top"
EXPORTS = [name for name in COMMANDS if name.startswith("export")]
ENGINES = ("run", "grade", "watch", "retry")  # they would answer what a damage made open; they meet it by hand below
READERS = {
    "batch.json": [*COMMANDS, DESK],
    "submitted.jsonl": [*COMMANDS, DESK],
    "results.jsonl": [*(name for name in COMMANDS if name not in ENGINES), DESK],
    "grades.json": EXPORTS,
    "reviews.jsonl": [*EXPORTS, DESK],
    "desk.json": [DESK],
}
LONG = "n" * 300
SURROGATE = "\ud800"
DEEP: Any = json.loads("[" * 900 + "]" * 900)
WRONG: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**30, float("nan"), 1e400),
    *("", "text", "x" * 300, "x" * 5000, SURROGATE, "\0", "../../elsewhere"),
    *([], [[]], {}, {"a": [1]}, DEEP),
]
BYTES = [b"", b"{", b"{}", b"{}\n", b"[]\n", b"null\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"a":' * 5000 + b"\n"]
Node = list[str | int]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a class of one, graded, reviewed and exported; its batch in `out`."""
    place = tmp_path_factory.mktemp("graded")
    out, assignment = plan_tiny_class(place / "class", 1)
    answer(out, assignment, [0])
    with Batch(out) as batch:
        batch.want_runs({assignment.tasks[0].job.job_id: 1})
    out.rename(place / "out")
    (place / "out" / "submitted.jsonl").write_text(
        "".join(json.dumps({"job_id": task.job.job_id, "run": 1}) + "\n" for task in assignment.tasks), "utf-8"
    )
    append_override(place / "out", Override(assignment.items[0].item_id, "works", 1, "Fine.", "I ran it", "Ada"))
    save_inputs(place / "out", Inputs("Means", str(place / "class/submissions"), str(place / "class/rubric.yaml")))
    (place / "prompts.jsonl").write_text('{"id": "a", "prompt": "Hello"}\n', "utf-8")
    (place / "kvasir.toml").write_text(config_text({"coder": SIMULATED_MODEL, "writer": SIMULATED_MODEL}), "utf-8")
    return place


Spoil = Callable[[str, bytes | None], None]


@pytest.fixture
def spoil(graded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Stands in a folder like `graded`, and makes its batch again with one file that holds something else."""
    for name in ("class", "prompts.jsonl", "kvasir.toml"):
        (tmp_path / name).symlink_to(graded / name)
    monkeypatch.chdir(tmp_path)
    assert cli.run_command(["results", str(graded / "out")]) == 0

    def make(file: str, data: bytes | None) -> None:
        shutil.rmtree("out", ignore_errors=True)
        shutil.copytree(graded / "out", "out")
        if data is None:
            Path("out", file).unlink()
            Path("out", file).mkdir()
        else:
            Path("out", file).write_bytes(data)

    return make


def nodes(value: Any, at: Node | None = None) -> Iterator[Node]:
    """The place of everything in a JSON value; of a list's items, the first."""
    at = at or []
    yield at
    children = (
        value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from nodes(child, [*at, key])


def replaced(value: Any, at: Node, wrong: Any) -> Any:
    if not at:
        return wrong
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], wrong)
    return copy


def without(value: Any, at: Node) -> Any:
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    if len(at) == 1:
        del copy[at[0]]
    else:
        copy[at[0]] = without(value[at[0]], at[1:])
    return copy


def damages(graded: Path, file: str) -> Iterator[tuple[str, bytes | None]]:
    """(what was done, the file's new content) for every way to spoil it; None: a directory in its place."""
    text = (graded / "out" / file).read_text("utf-8")
    yield "a directory", None
    yield from ((f"{data[:20]!r}", data) for data in BYTES)
    first, *rest = text.splitlines() if file.endswith("l") else [text]
    tail = "".join(f"\n{line}" for line in rest) + "\n"
    value = json.loads(first)
    for at in nodes(value):
        for wrong in WRONG:
            yield f"{at} = {wrong!r:.30}", (json.dumps(replaced(value, at, wrong)) + tail).encode()
        if at:
            yield f"{at} left out", (json.dumps(without(value, at)) + tail).encode()


def meet(name: str, spoil: Spoil, capsys: pytest.CaptureFixture[str], file: str, what: str, data: bytes | None) -> None:
    """A command ends with an exit code of ours; a refusal is one sentence. What is no error of ours comes out."""
    spoil(file, data)
    where = f"{name}: {file}: {what}"
    if name == DESK:
        look_in(where)
        return
    capsys.readouterr()
    code = cli.run_command(COMMANDS[name])
    out, err = capsys.readouterr()
    assert code in (0, cli.EXIT_FAILURE, cli.EXIT_USAGE), where
    assert "Traceback" not in out + err, where
    assert "Error(" not in err, where
    sentences = [line for line in err.splitlines() if line.startswith("kvasir: ")]
    assert len(sentences) == (code == cli.EXIT_USAGE), (where, err)


def look_in(what: str) -> None:
    """What the desk and `kvasir top` read. They say what is wrong by a KvasirError, or show it as a problem."""
    folder = Path("out").absolute()
    view = BatchView(folder, DeskBackend(load_settings(), None, folder.parent).request_of)
    reads: list[Callable[[], object]] = [
        lambda: find_folders(folder.parent),
        lambda: read_inputs(folder),
        lambda: view.refresh().counts(),
        lambda: [str(grade).encode() for grade in view.grades],
        lambda: Decisions(folder).refresh(),
        lambda: versions(folder),
        lambda: [watch.look() for watch in find_batches((folder,))],
    ]
    for read in reads:
        with suppress(KvasirError):
            read()  # anything else comes out
    assert "\n" not in view.problem, what


@pytest.mark.parametrize("file", READERS)
def test_a_damaged_file_is_a_sentence_whichever_command_meets_it(
    graded: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """Some damages, each with one command in turn; all of them are the system test below."""
    for number, (what, data) in enumerate(damages(graded, file)):
        if number < 2 or number % 97 == 0:
            meet(READERS[file][number % len(READERS[file])], spoil, capsys, file, what, data)


@pytest.mark.system
@pytest.mark.parametrize("file", READERS)
def test_each_damage_of_each_file(graded: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str], file: str) -> None:
    for number, (what, data) in enumerate(damages(graded, file)):
        meet(READERS[file][number % len(READERS[file])], spoil, capsys, file, what, data)


@pytest.mark.parametrize("name", [*(name for name in COMMANDS if name != "run"), DESK])
def test_what_was_found_by_hand_is_a_sentence_in_every_command(
    graded: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    manifest = json.loads((graded / "out" / "batch.json").read_text("utf-8"))
    changes = [
        {"runs": []},
        {"request": []},
        {"batch_id": 5},
        {"jobs": [{"job_id": 1}]},
        {"secret": ""},
        {"secret": "00" * 100},
        {"request": manifest["request"] | {"rubric": "/nowhere/rubric.yaml"}},
        {"request": manifest["request"] | {"models": {}}},
        {"request": manifest["request"] | {"folder": "x" * 300}},
        {"request": DEEP},
    ]
    for change in changes:
        meet(name, spoil, capsys, "batch.json", str(change)[:60], json.dumps(manifest | change).encode())
    for file in ("submitted.jsonl", "results.jsonl", "reviews.jsonl", "grades.json"):
        meet(name, spoil, capsys, file, "{}", b"{}\n")


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("submitted.jsonl", "results"),
        ("results.jsonl", "results"),
        ("reviews.jsonl", "export csv"),
    ],
)
def test_the_line_is_named(
    graded: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str], file: str, command: str
) -> None:
    spoil(file, (graded / "out" / file).read_bytes() + b"{}\n")
    lines = len(Path("out", file).read_text("utf-8").splitlines())

    assert cli.run_command(COMMANDS[command]) == cli.EXIT_USAGE

    assert f"{file}, line {lines} is not a valid" in capsys.readouterr().err


def test_a_class_whose_rubric_needs_another_model_since_is_told_so(
    graded: Path, spoil: Spoil, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((graded / "out" / "batch.json").read_text("utf-8"))
    manifest["request"]["models"] = {"code": "coder"}
    spoil("batch.json", json.dumps(manifest).encode())

    cli.run_command(COMMANDS["results"])  # shows the grades that were written last

    assert "needs a feedback model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["results", LONG],
        ["forget", LONG, "--yes"],
        ["export", LONG, "--format", "csv"],
        ["export", "out", "--format", "csv", "--to", LONG],
        ["export", "out", "--format", "canvas", "--gradebook", LONG, "--assignment", "a"],
        ["export", "out", "--format", "moodle", "--worksheet", LONG],
        ["grade", LONG, "--rubric", "class/rubric.yaml", "--out", "out"],
        ["grade", "class/submissions", "--rubric", f"{LONG}.yaml", "--out", "out"],
        ["grade", "class/submissions", "--rubric", "class/rubric.yaml", "--out", LONG],
        ["run", LONG, "--out", "out"],
        ["--config", LONG, "config"],
    ],
    ids=lambda arguments: " ".join(arguments)[:20],
)
def test_a_name_of_300_characters_is_a_sentence(
    spoil: Spoil, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    spoil("reviews.jsonl", b"")

    assert cli.run_command(arguments) == cli.EXIT_USAGE

    said = capsys.readouterr().err
    assert said.startswith("kvasir: ")
    assert len(said.splitlines()) == 1

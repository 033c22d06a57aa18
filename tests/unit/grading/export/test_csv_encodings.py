"""A CSV from a spreadsheet that is not UTF-8: one sentence says so and how to save it, whatever reads it."""

from dataclasses import replace
from pathlib import Path

import pytest

from grading.report.grades import save_graded
from grading.rubric.late import LateRule
from kvasir import cli
from tests.support.desk import answer, plan_tiny_class, write_grades

NAME = "student0_100_1_homework.py"
TABLES = {
    "requests": (["requests", "out", "--from", "t.csv"], f"submission,request\n{NAME},Zoë fragt\n"),
    "times": (["export", "out", "--format", "csv", "--times", "t.csv"], f"submission,submitted_at,é\n{NAME},,\n"),
    "gradebook": (
        ["export", "out", "--format", "canvas", "--gradebook", "t.csv"],
        "Student,ID,Section,Means (7)\n    Points Possible,,,5\nZoë,100,A,\n",
    ),
    "worksheet": (
        ["export", "out", "--format", "moodle", "--worksheet", "t.csv"],
        "Identifier,Full name,Grade,Last modified (grade)\nParticipant 1,Zoë,,-\n",
    ),
    "parts": (["bound", "out", "--draw", "2", "--strata", "t.csv"], f"submission,part\n{NAME},Übung\n"),
    "hand grades": (["bound", "out", "--sheet", "t.csv"], f"submission,works,remarks\n{NAME},1,schön\n"),
    "rubric": (["grade", "handed-in", "--rubric", "t.csv", "--dry-run"], "Rubric Name,Criteria Name\nÜbung,Läuft\n"),
}


@pytest.fixture(autouse=True)
def graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, assignment = plan_tiny_class(tmp_path, 3)
    answer(out, assignment, range(3))
    kept = write_grades(out, assignment)
    save_graded(out, replace(kept, late=LateRule("2026-11-03", 10)))


def said_of(kind: str, data: bytes, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    Path("t.csv").write_bytes(data)
    if kind == "hand grades":
        cli.run_command(["bound", "out", "--draw", "2"])
        Path("out/hand-grades.csv").write_bytes(data)
    Path("out/exports.jsonl").unlink(missing_ok=True)
    capsys.readouterr()
    command = ["bound", "out"] if kind == "hand grades" else TABLES[kind][0]
    return cli.run_command(command), capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("kind", TABLES)
def test_the_sentence_says_how_to_save_it(kind: str, encoding: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = said_of(kind, TABLES[kind][1].encode(encoding), capsys)

    assert code == cli.EXIT_USAGE
    assert "save it as 'CSV UTF-8'" in said
    assert "UTF-8" in said.partition("save it")[0]
    assert not any(word in said for word in ("codec", "Traceback", "decode", "\\x", "\0", "�"))


@pytest.mark.parametrize("kind", TABLES)
def test_a_byte_order_mark_as_spreadsheets_write_it_is_none_of_the_text(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TABLES[kind][1]
    assert said_of(kind, text.encode("utf-8-sig"), capsys) == said_of(kind, text.encode(), capsys)


def test_an_empty_table_of_requests_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert said_of("requests", b"", capsys) == (
        cli.EXIT_USAGE,
        "kvasir: the table of requests is empty; is it the right file?\n",
    )

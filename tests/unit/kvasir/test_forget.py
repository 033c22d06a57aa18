"""`kvasir forget` leaves nothing of a batch behind."""

import io
from pathlib import Path

import pytest

from kvasir import cli
from tests.support.homework import tiny, tiny_class


@pytest.fixture
def graded(configured_folder: Path) -> Path:
    homework = tiny_class(configured_folder / "homework", 1)
    cli.run_command(["grade", *tiny(homework, configured_folder / "out", "--quiet")])
    return configured_folder / "out"


def test_the_folder_goes_and_the_submissions_stay(graded: Path) -> None:
    assert cli.run_command(["forget", str(graded), "--yes"]) == 0

    assert not graded.exists()
    assert list((graded.parent / "homework/submissions").iterdir())


def test_what_students_asked_goes_too(graded: Path, tmp_path: Path) -> None:
    name = next((tmp_path / "homework/submissions").iterdir()).name
    (tmp_path / "asked.csv").write_text(f"submission,request\n{name},Why?\n", "utf-8")
    written = str(graded / "replies.csv")
    assert (
        cli.run_command(["requests", str(graded), "--from", str(tmp_path / "asked.csv"), "--to", written])
        == cli.EXIT_FAILURE
    )
    assert {"requests.jsonl", "replies.csv"} <= {item.name for item in graded.iterdir()}

    assert cli.run_command(["forget", str(graded), "--yes"]) == 0

    assert not graded.exists()


def test_what_is_not_ours_is_left_and_named(graded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (graded / "thesis.docx").write_text("mine")

    assert cli.run_command(["forget", str(graded), "--yes"]) == 0

    assert [item.name for item in graded.iterdir()] == ["thesis.docx"]
    assert "thesis.docx" in capsys.readouterr().out


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_without_a_yes_nothing_is_deleted(
    graded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    before = sorted(item.name for item in graded.iterdir())

    assert cli.run_command(["forget", str(graded)]) == cli.EXIT_FAILURE

    assert capsys.readouterr().err.endswith("nothing was deleted\n")
    assert sorted(item.name for item in graded.iterdir()) == before


def test_a_folder_without_a_batch_is_an_error(tmp_path: Path) -> None:
    assert cli.run_command(["forget", str(tmp_path), "--yes"]) == cli.EXIT_USAGE

"""What differs from the last export is said before the next one is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir import cli
from messages.errors import BatchError
from producers.export import note_given, since_last
from producers.export.final import apply
from producers.export.last import FILE
from producers.files.private import kept_in
from producers.grading.points import CriterionGrade, Grade
from producers.grading.reviews import Override
from producers.report.graded import GradedClass, save_graded
from tests.support.desk import answer, planned


def grade(name: str, points: float) -> Grade:
    criteria = (CriterionGrade("loops", "Loops", 6, points),)
    return Grade(name, "graded", points, 6, criteria, item_id=f"item-{name}")


CLASS = [grade("ada", 4), grade("benno", 5)]


def finals(*decided: Override) -> list:  # type: ignore[type-arg]
    return [apply(one, {each.criterion_id: each for each in decided if each.item_id == one.item_id}) for one in CLASS]


def test_the_first_export_has_nothing_before_it(tmp_path: Path) -> None:
    assert since_last(tmp_path, "csv", finals()).said() == "This would be the first export of this kind."


def test_only_what_differs_is_named_and_kinds_are_kept_apart(tmp_path: Path) -> None:
    note_given(tmp_path, since_last(tmp_path, "canvas", finals()).now)
    ada = Override("item-ada", "loops", 6, None, "I ran it", "eve")

    since = since_last(tmp_path, "canvas", finals(ada))

    assert since.said().startswith("1 grade would differ from the last export of this kind (")
    assert since.lines() == ["ada: 4 → 6"]
    assert since_last(tmp_path, "moodle", finals(ada)).last is None
    note_given(tmp_path, since.now)
    assert since_last(tmp_path, "canvas", finals(ada)).said().startswith("Nothing would differ")
    assert since_last(tmp_path, "canvas", finals()).lines() == ["ada: 6 → 4"]


def test_what_is_blank_or_gone_by_now_is_told(tmp_path: Path) -> None:
    note_given(tmp_path, since_last(tmp_path, "csv", finals()).now)
    failed = Grade("ada", "failed", None, 6, (), reason="not a notebook", item_id="item-ada")

    assert since_last(tmp_path, "csv", [apply(failed, {})]).lines() == ["ada: 4 → blank", "item-benno: 5 → blank"]


def test_the_file_names_nobody_and_is_forgotten_with_the_batch(tmp_path: Path) -> None:
    note_given(tmp_path, since_last(tmp_path, "csv", finals()).now)

    assert '"ada"' not in (tmp_path / FILE).read_text("utf-8")
    assert tmp_path / FILE in kept_in(tmp_path)


def test_a_line_of_somebody_elses_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"kind": "csv", "points": {"a": "many"}, "at": 1.0}\n', "utf-8")

    with pytest.raises(BatchError, match="line 1: no export of ours"):
        since_last(tmp_path, "csv", finals())


def test_the_command_says_it_first_and_a_dry_run_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, assignment = planned(tmp_path, 2)
    answer(folder, assignment, range(2))
    save_graded(folder, GradedClass("b1", "Homework 4", 6, tuple(CLASS)))
    words = ["export", str(folder), "--format", "csv"]

    assert cli.run([*words, "--dry-run"]) == 0
    assert "would be the first export" in capsys.readouterr().err
    assert not (folder / FILE).exists()
    assert not (folder / "grades.csv").exists()
    assert not (folder / "final-grades.csv").exists()

    assert cli.run(words) == 0
    capsys.readouterr()
    assert cli.run(words) == 0
    assert "Nothing would differ" in capsys.readouterr().err

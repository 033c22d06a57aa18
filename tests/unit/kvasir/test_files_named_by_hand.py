"""A folder made by hand, with a roster: every command says the same about who is matched."""

import csv
import json
import shutil
import zipfile
from pathlib import Path

import pytest

from grading.points import NAMED_REMARK, NOT_SENT_YET
from grading.roster import UNASSIGNED_QUESTION, UNMATCHED_QUESTION
from kvasir import cli

# `GradebookExporter#csv_data`, instructure/canvas-lms, `lib/gradebook_exporter.rb`
GRADEBOOK = """Student,ID,SIS Login ID,Section,Homework 1 (7001)
    Points Possible,,,,4.00
"Lindqvist, Anna",501,u1,A,
"Haugen, Bjorn",502,u2,A,
"Moretti, Carla",503,u3,A,
"Volkov, Dmitri",504,u4,A,
"Okafor, Eva",505,u5,A,
"""
WORKS = {
    "Carla Moretti hw1.txt": "mean is 20",
    "anna.md": "Homework 1, Anna Lindqvist\n\nmean is 20",
    "bjorn.md": "Homework 1, Bjorn Haugen\n\nmean is 21",
    "dmitri.py": "# Dmitri Volkov\nmean(c(1, 2))",
    "eva.md": "Eva thanks Bjorn.\n\nmean is 18",
}
UNMATCHED = [name for name in WORKS if not name.startswith("Carla")]
RUBRIC = "title: Homework 1\ncriteria: [{id: works, title: It works, points: 4, model: code}]\n"
GRADE = ("grade", "class", "--rubric", "rubric.yaml", "--roster", "gradebook.csv")


@pytest.fixture
def folder(configured_folder: Path) -> Path:
    place = configured_folder / "class"
    place.mkdir()
    for name, text in WORKS.items():
        (place / name).write_text(text, "utf-8")
    (configured_folder / "gradebook.csv").write_text(GRADEBOOK, "utf-8")
    (configured_folder / "rubric.yaml").write_text(RUBRIC, "utf-8")
    return configured_folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code, and all that was said."""
    capsys.readouterr()
    code = cli.run_command([*words])
    printed = capsys.readouterr()
    return code, printed.err + printed.out


def answer(capsys: pytest.CaptureFixture[str], **numbers: str) -> None:
    for stem, number in numbers.items():
        assert run(capsys, "assign", "out", stem, number)[0] == 0


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    cli.run_command(["results", "out", "--json"])
    return {row["submission"]: row for row in json.loads(capsys.readouterr().out)["submissions"]}


def job_count(folder: Path) -> int:
    return len((folder / "out" / "results.jsonl").read_text("utf-8").splitlines())


def test_every_command_names_the_files_that_match_nobody(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, *GRADE, "--dry-run")
    assert code == 0
    assert "4 of 5 names match nobody in the roster; once graded, say whose with kvasir assign: anna.md; " in said
    assert "4 of the roster handed in nothing, unless under such a name: Lindqvist, Anna; " in said
    assert "Moretti" not in said.partition("handed in nothing")[2]

    for words in ((*GRADE, "--out", "out"), ("results", "out")):
        code, said = run(capsys, *words)
        assert code == 1
        assert f"4 asked about:\n  whose is it? {UNMATCHED_QUESTION}: {'; '.join(UNMATCHED)}" in said
        assert "5 submissions: 5 graded" in said, "they are graded by the names of their files"

    code, said = run(capsys, "assign", "out")
    assert code == 1
    assert said.splitlines()[:-1] == [f"{name}: {UNMATCHED_QUESTION}" for name in UNMATCHED]
    assert said.endswith("assign out SUBMISSION PERSON\n")


def test_a_dry_run_of_a_part_says_nothing_of_who_handed_in_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "handed in nothing" not in run(capsys, *GRADE, "--dry-run", "--limit", "2")[1]


def test_answers_grade_nobody_again_and_end_the_questions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *GRADE, "--out", "out", "--limit", "3")[0] == 1
    answer(capsys, anna="501", bjorn="502", dmitri="504")  # Dmitri's is not graded yet
    before = job_count(folder)
    assert before == 3

    code, said = run(capsys, *GRADE, "--out", "out")

    assert job_count(folder) == before + 2, "Dmitri and Eva"
    assert code == 1
    assert "1 asked about:" in said
    assert not any(word in said for word in ("unassigned", "can't be read", "not sent"))
    code, said = run(capsys, "assign", "out", "eva.md", "Eva Okafor")
    assert (code, said) == (0, "eva.md is Okafor, Eva's\n")
    assert run(capsys, "assign", "out") == (0, "Nothing is open: it is known whose each submission is.\n")


def test_a_name_that_only_an_answer_shows_is_the_reason_for_grading_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, *GRADE, "--out", "out")
    before = job_count(folder)
    answer(capsys, anna="501", bjorn="502", dmitri="504", eva="505")

    for _ in range(2):
        remarks = {name: row["remarks"] for name, row in rows(capsys).items()}
        assert remarks == {name: [] for name in WORKS} | {"eva.md": [NAMED_REMARK]}

    assert run(capsys, *GRADE, "--out", "out")[0] == 0
    assert job_count(folder) == before + 1
    assert not any(row["remarks"] for row in rows(capsys).values())


def test_a_dry_run_goes_by_the_answers_of_the_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, *GRADE, "--out", "out")
    answer(capsys, anna="501", bjorn="502", dmitri="504", eva="505")

    _, said = run(capsys, *GRADE, "--dry-run", "--out", "out")
    assert "handed in nothing" not in said
    assert f"goes by the answers in {Path('out', 'assigned.jsonl')}" in said

    shutil.copytree("class", "other")
    _, said = run(capsys, "grade", "other", *GRADE[2:], "--dry-run", "--out", "out")
    assert "4 of the roster handed in nothing" in said, "the answers are about another folder"


def test_what_is_held_back_waits_once_it_is_known_whose_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in {"anna.md": "Anna Lindqvist.md", "bjorn.md": "502.md"}.items():
        (folder / "class" / old).rename(folder / "class" / new)  # now most are explained
    code, said = run(capsys, *GRADE, "--dry-run")
    assert code == 1
    assert f"2 unassigned:\n  {UNASSIGNED_QUESTION}: dmitri.py; eva.md" in said
    assert "can't be read" not in said

    code, said = run(capsys, *GRADE, "--out", "out")
    assert code == 1
    assert f"not sent: {UNASSIGNED_QUESTION}: dmitri.py; eva.md\n" in said
    assert f"2 unassigned:\n  {UNASSIGNED_QUESTION}: dmitri.py; eva.md" in said
    assert "100%, 2 not sent\n" in said
    assert "unreadable" not in said

    assert run(capsys, "assign", "out", "dmitri", "504")[1].endswith("'s; to send it, run kvasir grade again\n")
    answer(capsys, eva="505")
    code, said = run(capsys, "results", "out")
    assert code == 1
    assert f"2 waiting:\n  {NOT_SENT_YET}: Volkov, Dmitri; Okafor, Eva" in said
    assert "kvasir assign" not in said
    assert "3 graded, 2 waiting" in said
    assert not any(row["remarks"] for row in rows(capsys).values())

    assert run(capsys, *GRADE, "--out", "out")[0] == 0
    assert {row["state"] for row in rows(capsys).values()} == {"graded"}


def test_an_export_says_how_to_get_a_file_into_the_gradebook(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, *GRADE, "--out", "out")
    canvas = ("export", "out", "--format", "canvas", "--gradebook", "gradebook.csv", "--include-unreviewed", "--yes")
    code, said = run(capsys, *canvas)
    assert code == 1
    assert "anna.md: its name holds no Canvas user id, so it is not in the file: say whose with kvasir assign" in said

    answer(capsys, anna="501", bjorn="502", dmitri="504", eva="505")
    assert run(capsys, *canvas)[0] == 0


def test_name_and_number_of_who_was_assigned_are_in_tables_and_names_of_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, *GRADE, "--out", "out")
    answer(capsys, bjorn="502", eva="505")
    (folder / "asked.csv").write_text('submission,request\n505,a\n"Haugen, Bjorn",b\nEva Okafor,c\neva.md,d\n', "utf-8")
    assert "4 new requests." in run(capsys, "requests", "out", "--from", "asked.csv")[1]
    (folder / "asked.csv").write_text("student_id,request\n504,a\n", "utf-8")
    assert "no submission '504'" in run(capsys, "requests", "out", "--from", "asked.csv")[1]

    run(capsys, "export", "out", "--format", "csv", "--include-unreviewed", "--yes")
    run(capsys, "requests", "out", "--to", "replies.csv")
    run(capsys, "export", "out", "--format", "feedback", "--as", "html", "--include-unreviewed", "--yes")

    people = {}
    for path in (folder / "out" / "final-grades.csv", folder / "replies.csv"):
        with path.open(encoding="utf-8-sig", newline="") as file:
            people[path.name] = {row["submission"]: (row["student_id"], row["person"]) for row in csv.DictReader(file)}
    assert people["final-grades.csv"] == {
        "Carla Moretti hw1.txt": ("503", "Moretti, Carla"),
        "anna.md": ("", ""),
        "bjorn.md": ("502", "Haugen, Bjorn"),
        "dmitri.py": ("", ""),
        "eva.md": ("505", "Okafor, Eva"),
    }
    assert people["replies.csv"] == {"eva.md": ("505", "Okafor, Eva"), "bjorn.md": ("502", "Haugen, Bjorn")}
    with zipfile.ZipFile(folder / "out" / "feedback-html.zip") as archive:
        assert archive.namelist() == [
            "Carla Moretti hw1.txt.html",
            "anna.md.html",
            "haugenbjorn_502_bjorn.md.html",
            "dmitri.py.html",
            "okaforeva_505_eva.md.html",
        ]

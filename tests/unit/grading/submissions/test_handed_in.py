"""Whose a submission is, and what of it counts: every attachment, and nothing is dropped in silence."""

import zipfile
from pathlib import Path

import pytest

from grading.submissions.lms_names import age, claim_of, is_late, same_student, student_id
from grading.submissions.reading import Submission, read_submissions
from messages.errors import SubmissionError


def put(folder: Path, *names: str, text: str = "x <- 1") -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if not name.endswith(".html") else f"<p>{text}</p>", "utf-8")
    return folder


def names(found: list[Submission]) -> list[str]:
    return [submission.name for submission in found]


@pytest.mark.parametrize(
    ("name", "canvas", "moodle", "late"),
    [
        ("doejane_LATE_12_34_hw_2_1.R", "12", "", True),
        ("doe2_LATE_12_34_x.ipynb", "12", "", True),
        ("doejane_12_34_hw.R", "12", "", False),
        ("doejane_12_text.html", "12", "", False),
        ("Jane Doe_77_assignsubmission_file_", "", "77", False),
        ("Jane_Ann Doe_77_assignsubmission_onlinetext", "", "77", False),
        ("class/Jane Doe_77_assignsubmission_file_", "", "77", False),
        ("hw.R", "", "", False),
        ("doejane_12_34", "12", "", False),  # a folder, or a zip's
        ("anon_LATE_Xy9_103_hw1.ipynb", "Xy9", "", True),
        ("anon_Xy9_text.html", "Xy9", "", False),
        ("LATE_anon_7Qz9P_99001_hw5.ipynb", "7Qz9P", "", True),  # `ContentZipper#get_filename`
        ("maplewickmia_LATE_71024_link.html", "71024", "", True),
        ("Ana Sobrino_50100_assignsubmission_file_hw5 Ana Sobrino.ipynb", "", "50100", False),
        ("alice_2024_hw.py", "", "", False),
        ("alice_hw_3_2024_final.py", "", "", False),
        ("alice_LATE_3_final.py", "", "", False),
        ("o_brien_kay_LATE_71003_9_hw5.R", "71003", "", True),
        ("o_brien_kay_LATE_71003_text.html", "71003", "", True),
        ("o_brien_kay_71003_9_hw5.R", "", "", False),  # only a roster can tell where its name ends
        ("doejane_12_34_My_LATE_5_6_a.R", "12", "", False),
        ("alice_3_14.py", "", "", False),
        ("homework_3_alice.py", "", "", False),
        ("anon_notes_2.py", "", "", False),
    ],
)
@pytest.mark.public_report("instructure/canvas-lms lib/content_zipper.rb")
def test_names_say_whose_it_is(name: str, canvas: str, moodle: str, late: bool) -> None:
    claim = claim_of(name)
    assert (claim.product if claim else "") == ("canvas" if canvas else "moodle" if moodle else "")
    assert (student_id(name), is_late(name)) == (canvas + moodle, late)


def test_a_year_in_a_name_is_nobodys_id(tmp_path: Path) -> None:
    put(tmp_path, "alice_2024_hw.py", "bob_2024_hw.py", text="print(2024)")

    assert len(read_submissions(tmp_path)) == 2
    with pytest.raises(SubmissionError, match="no submission named '2024'"):
        read_submissions(tmp_path, names=["2024"])


def test_every_attachment_counts(tmp_path: Path) -> None:
    """Canvas's zip holds the attachments of the current attempt alone: canvas-lms, lib/content_zipper.rb,
    `get_uploaded_files_from`. A file of a name that was taken gets `-1`, and replaces nothing."""
    put(tmp_path, "doe_12_901_q1.R", "doe_12_902_q2.R", "doe_12_903_q2-1.R", "roe_13_902_a.R")

    doe, roe = read_submissions(tmp_path)

    assert (doe.name, len(doe.parts), len(roe.parts)) == ("doe_12_903_q2-1.R", 3, 1)
    assert doe.superseded_names == doe.doubtful_notes == ()
    assert "graded with 2 more files of the same student" in doe.notes


@pytest.mark.public_report("jupyter/nbgrader 724")
def test_of_a_second_attempt_at_two_problems_both_count(tmp_path: Path) -> None:
    """There the second attempt's first problem replaced the first attempt's, and its second was skipped."""
    put(tmp_path, "doe_12_901_problem1.R", "doe_12_902_problem2.R", text="first <- 1")
    put(tmp_path, "doe_12_1001_problem1 (1).R", "doe_12_1002_problem2 (1).R", text="second <- 2")

    (doe,) = read_submissions(tmp_path)

    assert [part.text for part in doe.parts] == ["second <- 2"] * 2
    assert doe.superseded_names == ("doe_12_901_problem1.R", "doe_12_902_problem2.R")


def test_of_copies_the_latest_counts_and_a_person_is_asked(tmp_path: Path) -> None:
    put(tmp_path, "doe_12_901_hw.R", "doe_LATE_12_1003_hw (1).R", "doe_12_99_hw (2).R", "doe_12_1004_q2.R")

    (doe,) = read_submissions(tmp_path)

    assert (doe.name, len(doe.parts)) == ("doe_12_1004_q2.R", 2)
    assert doe.superseded_names == ("doe_12_99_hw (2).R", "doe_12_901_hw.R")
    assert doe.doubtful_notes == ("the latest counts: 2 earlier files of the same student left out",)
    assert set(doe.doubtful_notes) < set(doe.notes)


def test_a_row_is_named_after_what_was_read(tmp_path: Path) -> None:
    put(tmp_path, "doe_LATE_12_901_hw.R", "doe_LATE_12_902_writeup.pdf", "doe_LATE_12_903_sales.csv")

    (doe,) = read_submissions(tmp_path)

    assert doe.name == "doe_LATE_12_901_hw.R"
    assert "handed in late" in doe.notes


@pytest.mark.public_report("jupyter/nbgrader 1302")
def test_work_under_another_name_than_the_assignments_is_read(tmp_path: Path) -> None:
    """There a notebook that a student had renamed was unknown, and nothing of hers was graded."""
    put(tmp_path, "wms16/WMS q3.py", "xyz17/q3.py", "xyz17/jupyter.png")

    assert [(work.name, len(work.parts)) for work in read_submissions(tmp_path)] == [("wms16", 1), ("xyz17", 1)]


def test_attachments_of_different_kinds_are_graded_together(tmp_path: Path) -> None:
    put(tmp_path, "doe_12_901_a.R", "doe_12_text.html")

    [doe] = read_submissions(tmp_path)

    assert doe.name == "doe_12_901_a.R"
    assert [part.kind for part in doe.parts] == ["code", "text"]
    assert any("1 more file of the same student" in note for note in doe.notes)


def test_a_browsers_second_download_replaces_the_first(tmp_path: Path) -> None:
    put(tmp_path, "anna.R", "anna (1).R", "anna (2).R", "bea (1).R")

    anna, bea = read_submissions(tmp_path)

    assert (anna.name, anna.superseded_names) == ("anna (2).R", ("anna.R", "anna (1).R"))
    assert (bea.name, bea.superseded_names) == ("bea (1).R", ())


@pytest.mark.parametrize("wrapper", ["", "Homework 4/"])
def test_a_moodle_zip_is_read_like_its_folder(tmp_path: Path, wrapper: str) -> None:
    path = tmp_path / "class.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in (77, 78):
            archive.writestr(f"{wrapper}Student {number}_{number}_assignsubmission_file_/hw.R", "x <- 1")

    assert [student_id(name) for name in names(read_submissions(path))] == ["77", "78"]


def test_ages_and_students_are_told_from_names_alone() -> None:
    assert age("doe_12_99_a.R") < age("doe_12_901_a.R")
    assert same_student("doe_12_99_a.R") == same_student("doe_LATE_12_901_b.R")
    assert same_student("doe_12_99_a.R") != same_student("doe_13_99_a.R")
    assert same_student("Zo\u00eb.R") == same_student("Zoe\u0308 (1).R")

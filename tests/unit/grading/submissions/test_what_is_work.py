"""What counts as work, and what doesn't: addresses, other people's code, pointers, equal files, guessed encodings."""

import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from grading.export.final import apply_decisions
from grading.own_work import with_equal_files_noted
from grading.points import grade_submission
from grading.reviews import Override
from grading.rubric.rubric import Criterion, Rubric
from grading.submissions.archives import decode_text
from grading.submissions.handed_in import ignored_files_sentence
from grading.submissions.reading import Submission, read_submissions

RUBRIC = Rubric("Homework 5", "", (Criterion("a", "A", 4, "", "code"),), "d" * 32)
ADDRESS = "https://colab.research.google.com/drive/1x?a=1&copy=2"
# canvas-lms, app/views/assignments/redirect_page.html.erb, filled in without escapes (lib/content_zipper.rb,
# `add_online_submission_content`).
LINK_PAGE = f"""<html xmlns="http://www.w3.org/1999/xhtml">
<head>
  <meta http-equiv="Content-Type" content="text/html;charset=utf-8" />
  <meta http-equiv="Refresh" content="0; url={ADDRESS}">
  <title>Homework 5: Ada Aldertree</title>
</head>
<body>
<h1>Homework 5: Ada Aldertree</h1>
This submission was a url. <a href="{ADDRESS}">Click Here to go to the submission</a>
</body>
</html>"""
# The same for app/views/assignments/text_entry_page.html.erb.
TEXT_PAGE = """<html xmlns="http://www.w3.org/1999/xhtml">
<head>
  <meta http-equiv="Content-Type" content="text/html;charset=utf-8" />
  <title>Homework 5: Ada Aldertree</title>
</head>
<body>
<h1>Homework 5: Ada Aldertree</h1>
<div style="width: 600px; margin: 20px auto; border: 1px solid #888; padding: 20px;">
  {}
</div>
</body>
</html>"""
CONFLICT = "x <- 1\n<<<<<<< HEAD\nx <- 2\n=======\nx <- 3\n>>>>>>> other\n"
LONG = "".join(f"value_{number} <- {number}\n" for number in range(20))


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return folder


def read(folder: Path, files: dict[str, str]) -> dict[str, Submission]:
    return {submission.name: submission for submission in read_submissions(write(folder, files))}


# --- an address instead of work


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aldertreeada_LATE_12_link.html", LINK_PAGE),
        ("aldertreeada_LATE_12_text.html", TEXT_PAGE.format(f'<p><a href="{ADDRESS}">{ADDRESS}</a></p>')),
        ("aldertreeada_LATE_12_901_hw.txt", f"\n  {ADDRESS}\n"),
        ("aldertreeada_LATE_12_901_hw.md", f"[my notebook]({ADDRESS})"),
        ("aldertreeada_LATE_12_901_hw.R", f"<{ADDRESS}>"),
    ],
)
@pytest.mark.public_report("instructure/canvas-lms lib/content_zipper.rb")
def test_an_address_alone_is_no_work_but_keeps_id_and_lateness(tmp_path: Path, name: str, text: str) -> None:
    (submission,) = read(tmp_path, {name: text.replace("&", "&amp;") if "text.html" in name else text}).values()
    grade = grade_submission(name, RUBRIC, {}, submission)

    assert submission.link == ADDRESS
    assert not submission.is_gradable
    assert (grade.state, grade.points) == ("link only", None)
    assert grade.review_reasons == (f"only a link was handed in: {ADDRESS}",)
    assert "handed in late" in grade.reason
    final = apply_decisions(grade, {}, include_unreviewed=True)
    assert (final.points, final.why_blank) == (None, f"link only: {grade.reason}")
    assert apply_decisions(grade, {None: Override("x", None, 3, None, "seen there")}).points == 3


@pytest.mark.parametrize("text", [f"See {ADDRESS}", f"{ADDRESS}\n{ADDRESS}/2", "x <- 1", ""])
def test_work_with_an_address_in_it_is_work(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, {"ada.md": text})["ada.md"].link == ""


def test_a_link_beside_work_is_part_of_it(tmp_path: Path) -> None:
    only_links = {"doe_1_2_a.txt": ADDRESS, "doe_1_3_b.txt": f"{ADDRESS}/b", "doe_1_4_c.txt": "  \n"}
    submissions = read(tmp_path, {**only_links, "roe_2_5_a.txt": ADDRESS, "roe_2_6_b.R": "x <- 1"})

    assert submissions["doe_1_4_c.txt"].link == f"{ADDRESS} {ADDRESS}/b"
    assert submissions["roe_2_6_b.R"].is_gradable


def test_canvas_own_heading_is_no_text_of_the_student(tmp_path: Path) -> None:
    pages = {"a_1_text.html": TEXT_PAGE.format("<p>Sales rose.</p>"), "b_2_text.html": TEXT_PAGE.format("")}
    written, empty = read(tmp_path, pages).values()

    assert [part.text for part in written.parts] == ["Sales rose."]
    assert empty.empty


# --- other people's code


@pytest.mark.parametrize(
    ("name", "asks"), [("table.xlsx", True), ("work.rar", True), ("plot.png", False), ("LICENSE", False)]
)
def test_what_may_hold_work_and_is_not_read_is_asked_about(tmp_path: Path, name: str, asks: bool) -> None:
    work = tmp_path / "ada"
    work.mkdir()
    (work / "hw5.R").write_text("x <- 1", "utf-8")
    (work / name).write_bytes(b"PK\x03\x04")

    [read] = read_submissions(tmp_path)

    assert sum("1 file left out" in note for note in read.notes) == 1
    assert bool(read.doubtful_notes) == asks


@pytest.mark.parametrize("as_zip", [False, True])
def test_other_peoples_code_and_data_are_left_out_and_said_once(tmp_path: Path, as_zip: bool) -> None:
    files = {
        "ada/hw.py": "x = 1",
        "ada/venv/lib/a.py": "theirs",
        "ada/src/.venv/b.py": "theirs",
        "ada/env/lib/python3.12/site-packages/c.py": "theirs",
        "ada/node_modules/d/readme.md": "theirs",
        "ada/.git/e.txt": "theirs",
        "ada/__pycache__/f.py": "theirs",
        "ada/sales.csv": "1",
        "bob/hw.R": "2",
        "bob/renv/activate.R": "theirs",
        "bob/sales.CSV": "1",
        "venv/g.py": "theirs",
        ".git/h.txt": "theirs",
        "__MACOSX/ada/venv/._a.py": "clutter",
        "classroom_roster.csv": "identifier,github_username,github_id,name",  # as GitHub Classroom calls it
    }
    folder = write(tmp_path / "class", files)
    if as_zip:
        with zipfile.ZipFile(tmp_path / "class.zip", "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        folder = tmp_path / "class.zip"

    submissions = read_submissions(folder)

    assert [(each.name, [part.text for part in each.parts], each.notes) for each in submissions] == [
        ("ada", ["x = 1"], ()),
        ("bob", ["2"], ()),
    ]
    assert ignored_files_sentence(submissions) == (
        "Not the students' own, so not read: .csv files (in 2 submissions), .git (in 1 submission), "
        ".venv (in 1 submission), __pycache__ (in 1 submission), node_modules (in 1 submission), "
        "renv (in 1 submission), site-packages (in 1 submission), venv (in 1 submission)"
    )
    assert ignored_files_sentence([replace(submissions[0], ignored_kinds=())]) == ""


def test_thousands_of_other_peoples_files_are_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grading.submissions.archives.MAX_MEMBERS", 5)
    files = {"hw.py": "x = 1", **{f"venv/{number}.py": "theirs" for number in range(50)}}
    write(tmp_path / "ada", files)
    with zipfile.ZipFile(tmp_path / "bob.zip", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)

    assert [[part.text for part in each.parts] for each in read_submissions(tmp_path)] == [["x = 1"], ["x = 1"]]


def test_data_alone_is_a_row_that_cannot_be_read(tmp_path: Path) -> None:
    submissions = read(tmp_path, {"ada_1_2_sales.csv": "1", "bob/venv/a.py": "theirs", "roe.R": "1"})

    assert "files of type .csv can't be read" in submissions["ada_1_2_sales.csv"].problem
    assert "holds no file that can be read" in submissions["bob"].problem


# --- git's leavings


@pytest.mark.parametrize("address", ["https://git-lfs.github.com/spec/v1", "https://hawser.github.com/spec/v1"])
def test_a_git_lfs_pointer_is_called_that(tmp_path: Path, address: str) -> None:
    """git-lfs/git-lfs, docs/spec.md, "The Pointer"."""
    pointer = f"version {address}\noid sha256:4d7a2146\nsize 12345\n"
    submissions = read(tmp_path, {"ada.ipynb": pointer, "bob/hw.R": pointer, "bob/q2.R": "x <- 1"})

    assert submissions["ada.ipynb"].problem.startswith("it is only a Git LFS pointer")
    assert submissions["bob"].doubtful_notes == (f"file 1 (.r): {submissions['ada.ipynb'].problem}",)


def test_a_merge_conflict_is_called_that(tmp_path: Path) -> None:
    files = {"ada.R": CONFLICT, "bob.ipynb": f'{{"cells": [\n{CONFLICT}]}}', "cleo.md": "A\n=======\n\n>>>>>>> B\n"}
    submissions = read(tmp_path, {**files, "dan/a.R": CONFLICT, "dan/b.R": "1"})

    assert submissions["ada.R"].doubtful_notes == ("it holds an unresolved merge conflict",)
    assert submissions["bob.ipynb"].problem.startswith("it holds an unresolved merge conflict")
    assert submissions["cleo.md"].doubtful_notes == ()
    assert submissions["dan"].doubtful_notes == ("file 1 (.r): it holds an unresolved merge conflict",)


# --- whose file it is


def test_equal_files_are_a_remark_on_both(tmp_path: Path) -> None:
    files = {"ada/a.R": LONG, "bob/b.R": LONG, "cleo.R": LONG + "#", "dan.R": "x <- 1", "eve.R": "x <- 1"}
    write(tmp_path, files)
    os.link(tmp_path / "cleo.R", tmp_path / "fay.R")

    notes = {each.name: each.notes for each in with_equal_files_noted(read_submissions(tmp_path))}

    assert notes["ada"] == notes["bob"] != ()
    assert notes["cleo.R"] == notes["fay.R"] != notes["ada"]
    assert notes["ada"][0].startswith("the same file is in 1 other submission, too (mark ")
    assert notes["dan.R"] == notes["eve.R"] == ()


def test_a_file_that_most_of_the_class_has_was_given_and_is_no_remark(tmp_path: Path) -> None:
    files = {
        f"{name}/{file}": LONG if file == "given.R" else name * 50 for name in "abcdefgh" for file in ("given.R", "q.R")
    }
    class_work = read_submissions(write(tmp_path, files))
    unchanged = [replace(each, only_template=True) for each in class_work[:2]]

    assert with_equal_files_noted(class_work) == class_work
    assert with_equal_files_noted(unchanged) == unchanged


# --- encodings


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("# 收入 提高了 收入\n因为 门店 自己选择", "gbk"),
        ("# Выручка выросла, потому что магазины выбрали", "koi8_r"),
        ("# Выручка выросла, потому что магазины выбрали", "cp1251"),
        ("Der Erlös stieg, weil die Läden größer sind", "mac_roman"),
        ("# Überschuß: der Erlös ist gut", "cp850"),
        ("# Średnia sprzedaż wzrosła, bo kampania była udana", "cp1250"),
    ],
)
@pytest.mark.public_report("ucbds-infra/otter-grader 524", "ucbds-infra/otter-grader 443", "jupyter/nbgrader 1042")
def test_what_would_be_gibberish_is_guessed_and_shown(text: str, encoding: str) -> None:
    read_text, note, doubt = decode_text(text.encode(encoding))

    assert (read_text, note) == (text, "")
    assert text.split("\n")[0][:12] in doubt


def test_a_wrong_guess_is_shown_as_it_was_read() -> None:
    text, _, doubt = decode_text("# 売上が増えました。店舗が自分で選んだからです。".encode("cp932"))

    assert text[2:12] in doubt


@pytest.mark.parametrize(
    "text",
    [
        "# Überschuß: Erlös – „gut“",
        "# Le café a augmenté les ventes à l’été, où ça coûte 5\xa0€ : «\xa0créé\xa0»",
        "# El año pasado la campaña subió más: ¿sí? NIÑO",
        "It’s a “good” result – really… it costs £5, naïve word—word",
        "temp <- 5°C ± 2 × 3µm, ½ of §3, a±b, R², don´t, col·lecció",
        "þýðir að það sé gott; Åsa köpte på ön; não é à São João; pääsy äiti",
    ],
)
def test_western_text_is_read_as_windows_wrote_it(text: str) -> None:
    assert decode_text(text.encode("cp1252")) == (text, "its encoding is not UTF-8; it was read as Windows-1252", "")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_read_without_its_mark(encoding: str) -> None:
    text = "lift = 0.02  # Erlös, 売上\nprint(lift)\n"

    assert decode_text(text.encode(encoding)) == (text, "", "")


def test_a_guess_is_a_doubt_of_the_grade(tmp_path: Path) -> None:
    (tmp_path / "ada.txt").write_bytes("Выручка выросла, потому что магазины выбрали себя".encode("koi8_r"))

    (submission,) = read_submissions(tmp_path)

    assert len(submission.doubtful_notes) == 1
    assert submission.doubtful_notes[0] in submission.notes

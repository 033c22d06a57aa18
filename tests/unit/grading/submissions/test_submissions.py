import json
import os
from pathlib import Path

import pytest

from grading.submissions import archives
from grading.submissions import reading as submissions
from grading.submissions.reading import read_document, read_submissions
from messages.errors import SubmissionError

NOTEBOOK = json.dumps(
    {"metadata": {"kernelspec": {"name": "ir"}}, "cells": [{"cell_type": "markdown", "source": "Sales rose."}]}
)


def put(folder: Path, **files):
    """Files by name; `__` stands for the dot and `0` for the slash."""
    for name, content in files.items():
        path = folder / name.replace("__", ".").replace("0", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def read_one(tmp_path, name, content, **more):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode(**more))
    [submission] = read_submissions(path)
    return submission


def shape(submission):
    return [(part.kind, part.text, part.location) for part in submission.parts]


# --- kinds of file


@pytest.mark.parametrize(
    ("name", "language", "kind"),
    [
        ("a.R", "R", "code"),
        ("a.r", "R", "code"),
        ("a.py", "Python", "code"),
        ("a.sql", "SQL", "code"),
        ("a.md", "", "text"),
        ("a.txt", "", "text"),
    ],
)
def test_a_plain_file_is_one_part(tmp_path, name, language, kind):
    submission = read_one(tmp_path, name, "one\r\ntwo\n")

    assert (submission.name, submission.language, submission.problem) == (name, language, "")
    assert [(part.kind, part.text) for part in submission.parts] == [(kind, "one\ntwo")]


RMD = """---
title: Sales
author: Jane Doe
---
Introduction.

```{r setup, fig.cap="a } b"}
x <- 1
```
```{sql, connection=db}
SELECT 1
```

Not run:
```r
x
```
"""


@pytest.mark.parametrize("name", ["a.Rmd", "a.qmd"])
def test_r_markdown_is_split_into_chunks_and_prose_without_its_header(tmp_path, name):
    submission = read_one(tmp_path, name, RMD)

    assert shape(submission) == [
        ("text", "Introduction.", "text 1"),
        ("code", "x <- 1", "chunk 1"),
        ("code", "SELECT 1", "chunk 2"),
        ("text", "Not run:\n```r\nx\n```", "text 2"),
    ]
    assert submission.language == "SQL"  # the longer one


def test_a_chunk_that_is_never_closed_is_read_to_the_end_and_noted(tmp_path):
    submission = read_one(tmp_path, "a.Rmd", "```{r}\nx <- 1\ny <- 2")

    assert shape(submission) == [("code", "x <- 1\ny <- 2", "chunk 1")]
    assert submission.notes == ("the last code chunk is never closed",)


def test_markdown_loses_its_header_only_where_it_has_one(tmp_path):
    assert shape(read_one(tmp_path, "a.md", "---\nauthor: Jane\n---\nText"))[0][1] == "Text"
    assert shape(read_one(tmp_path, "b.md", "---\nno end"))[0][1] == "---\nno end"


def test_inline_pictures_in_markdown_are_counted(tmp_path):
    assert read_one(tmp_path, "a.md", "![p](data:image/png;base64,AAAA)").images_left_out == 1


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_with_nothing_in_it_is_empty_and_no_problem(tmp_path, content):
    submission = read_one(tmp_path, "a.R", content)

    assert submission.empty
    assert not submission.problem


def test_outputs_alone_are_empty(tmp_path):
    cell = {"cell_type": "code", "source": "", "outputs": [{"output_type": "stream", "text": "hi"}]}

    submission = read_one(tmp_path, "a.ipynb", json.dumps({"cells": [cell]}))

    assert submission.empty
    assert [part.kind for part in submission.parts] == ["output"]


# --- encodings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_marked_encodings_are_read_without_a_note_and_windows_text_with_one(tmp_path, encoding):
    submission = read_one(tmp_path, "a.R", "x <- 'Größe €'", encoding=encoding)

    note = ("its encoding is not UTF-8; it was read as Windows-1252",)
    assert (submission.parts[0].text, submission.notes) == ("x <- 'Größe €'", note if encoding == "cp1252" else ())


@pytest.mark.parametrize("content", [b"x\0y", b"\xff\xfe\x00\x00", b"\x80\x01\x02\x03\x04", bytes(range(256))])
def test_binary_content_is_a_problem(tmp_path, content):
    submission = read_one(tmp_path, "a.R", content)

    assert "not a text file" in submission.problem
    assert submission.parts == ()
    assert not submission.empty


# --- folders


def test_files_and_subfolders_are_submissions_sorted_by_name(tmp_path):
    put(tmp_path, b__R="2", a__R="1", c0part2__R="4", c0part1__md="3", c0deep0er__py="5")

    found = read_submissions(tmp_path)

    assert [submission.name for submission in found] == ["a.R", "b.R", "c"]
    assert shape(found[2]) == [
        ("code", "5", "file 1 (.py), script"),
        ("text", "3", "file 2 (.md), text"),
        ("code", "4", "file 3 (.r), script"),
    ]


def test_hidden_files_and_clutter_are_ignored(tmp_path):
    put(tmp_path, a__R="1", __hidden__R="x", Thumbs__db="x", s0b__R="2")
    put(tmp_path / "__MACOSX", a__R="x")
    put(tmp_path / ".ipynb_checkpoints", a__ipynb="x")
    put(tmp_path / "s" / ".ipynb_checkpoints", a__ipynb="x")

    found = read_submissions(tmp_path)

    assert [(submission.name, len(submission.parts)) for submission in found] == [("a.R", 1), ("s", 1)]


def test_other_kinds_are_a_problem_at_the_top_and_a_note_in_a_folder(tmp_path):
    put(tmp_path, a__odt="x", b="x", s0work__R="1", s0data__csv="x", s0plot__png="x", s0more__csv="x", s0inner__zip="x")

    odt, bare, folder = read_submissions(tmp_path)

    assert odt.problem == (
        "files of type .odt can't be read; hand in one of: "
        ".ipynb, .r, .rmd, .qmd, .py, .sql, .md, .txt, .html, .docx, .pdf"
    )
    assert bare.problem.startswith("files without a known type can't be read")
    assert folder.ignored_kinds == (".csv files",)
    assert folder.notes == (
        "1 file left out: files of type .png can't be read",
        "1 file left out: the zip is damaged: hand it in again",
    )


def test_a_folder_with_one_bad_file_is_read_without_it_and_says_so(tmp_path):
    put(tmp_path, s0a__ipynb="{", s0b__R="1")

    [folder] = read_submissions(tmp_path)

    assert shape(folder) == [("code", "1", "file 2 (.r), script")]
    assert folder.notes[0].startswith("file 1 (.ipynb): it is not valid JSON")


def test_a_folder_with_nothing_readable_is_a_problem(tmp_path):
    put(tmp_path, a__R="1", none0data__csv="x", bad0a__ipynb="{")
    (tmp_path / "void").mkdir()

    bad, none, void = read_submissions(tmp_path)[1:]

    assert bad.problem.startswith("it is not valid JSON")
    assert none.problem == void.problem
    assert void.problem.startswith("the folder holds no file that can be read; hand in one of: .ipynb")


def test_no_name_of_a_file_reaches_anything_but_the_submissions_name(tmp_path):
    folder = put(
        tmp_path / "janedoe_1_2_hw", janedoe1__ipynb="{", janedoe2__R="x", janedoe3__pdf="x", janedoe4__Rmd=RMD
    )
    put(tmp_path, janedoe__pdf="x", janedoe__ipynb="{")
    (folder / "janedoe.R").symlink_to("/dev/null")

    for submission in read_submissions(tmp_path):
        assert "jane" in submission.name
        assert "jane" not in repr([submission.parts, submission.notes, submission.problem]).lower()


def test_a_bad_submission_does_not_stop_the_class(tmp_path):
    put(tmp_path, a__ipynb="[" * 200_000, b__ipynb=NOTEBOOK, c__ipynb=b"\0", d__ipynb="")

    problems = [submission.problem for submission in read_submissions(tmp_path)]

    assert [bool(problem) for problem in problems] == [True, False, True, True]
    assert problems[3] == "the file is empty"


def test_a_file_past_the_size_limit_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_FILE_BYTES", 10)
    put(tmp_path, a__R="x" * 11, b__R="x" * 10)

    big, fitting = read_submissions(tmp_path)

    assert big.problem.startswith("it is larger than")
    assert not fitting.problem


def test_a_folder_is_read_up_to_a_size_and_the_rest_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_FOLDER_BYTES", 10)
    put(tmp_path, s0a__R="x" * 6, s0b__R="y" * 6)

    [folder] = read_submissions(tmp_path)

    assert [part.text for part in folder.parts] == ["x" * 6]
    assert folder.notes[0].startswith("file 2 (.r): it is left out, because the folder's text is longer than")


def test_a_subfolder_with_too_many_files_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    put(tmp_path, a__R="1", s01__R="", s02__R="", s03__R="", s04__R="")

    assert read_submissions(tmp_path)[1].problem == "the folder holds more than 3 files; hand in the work alone"


def test_links_are_read_only_where_they_stay_inside_their_submission(tmp_path):
    (tmp_path / "secret.R").write_text("secret")
    root = put(tmp_path / "class", a__R="1", s0own__R="2")
    (root / "classmate.R").symlink_to(root / "a.R")
    (root / "s" / "classmate.R").symlink_to(root / "a.R")
    (root / "s" / "inside.R").symlink_to(root / "s" / "own.R")
    (root / "outside.R").symlink_to(tmp_path / "secret.R")
    (root / "loop.R").symlink_to(root / "loop.R")
    (root / "s" / "up").symlink_to(tmp_path)
    (root / "s" / "outside.R").symlink_to(tmp_path / "secret.R")

    found = {submission.name: submission for submission in read_submissions(root)}

    assert found["outside.R"].problem == "it is a link that doesn't lead to a file of this submission"
    assert found["classmate.R"].problem == found["outside.R"].problem
    assert found["loop.R"].problem == found["outside.R"].problem
    assert {part.text for part in found["s"].parts} == {"2"}
    assert [part.location for part in found["s"].parts] == ["file 2 (.r), script", "file 4 (.r), script"]
    assert len(found["s"].doubtful_notes) == 3


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.R")
    put(tmp_path, a__R="1")

    assert read_submissions(tmp_path)[1].problem == "it is not an ordinary file"


def test_a_name_that_is_not_utf_8_still_encodes(tmp_path):
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.R"))).write_text("1")

    [submission] = read_submissions(tmp_path)

    assert submission.name.encode() == "caf\ufffd.R".encode()
    assert submission.parts[0].text == "1"


# --- choosing


NAMES = (
    *("adamsamy_101_9001_hw1.ipynb", "doejane_LATE_102_9002_hw1.ipynb", "anon_Xy9_103_hw1.ipynb", "plain.R"),
    "Jane Roe_77_assignsubmission_file_hw1.ipynb",
)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("plain.R", ["plain.R"]),
        ("plain", ["plain.R"]),
        ("101", ["adamsamy_101_9001_hw1.ipynb"]),
        ("102", ["doejane_LATE_102_9002_hw1.ipynb"]),
        ("Xy9", ["anon_Xy9_103_hw1.ipynb"]),
        ("77", ["Jane Roe_77_assignsubmission_file_hw1.ipynb"]),
    ],
)
def test_only_takes_names_stems_and_student_ids(tmp_path, wanted, names):
    for name in NAMES:
        (tmp_path / name).write_text(NOTEBOOK)

    assert [submission.name for submission in read_submissions(tmp_path, names=[wanted])] == names


def test_a_name_that_matches_nothing_is_an_error(tmp_path):
    put(tmp_path, a__R="1")

    with pytest.raises(SubmissionError, match=r"holds no submission named 'b'"):
        read_submissions(tmp_path, names=["a", "b"])


def test_a_limit_takes_the_first_by_name(tmp_path):
    put(tmp_path, c__R="1", a__R="1", b__R="1")

    assert [submission.name for submission in read_submissions(tmp_path, limit=2)] == ["a.R", "b.R"]
    assert len(read_submissions(tmp_path, limit=0)) == 3
    with pytest.raises(SubmissionError, match="limit must be 0"):
        read_submissions(tmp_path, limit=-1)


# --- errors of the whole
def test_a_path_with_nothing_to_read_is_an_error_that_names_it(tmp_path):
    with pytest.raises(SubmissionError, match="nowhere: there is no such file or folder"):
        read_submissions(tmp_path / "nowhere")
    with pytest.raises(SubmissionError, match=f"{tmp_path.name} holds no submission that can be read"):
        read_submissions(tmp_path)
    put(tmp_path, a__odt="x", b0c__png="x")
    with pytest.raises(SubmissionError, match=f"{tmp_path.name} holds no submission that can be read"):
        read_submissions(tmp_path)


def test_a_solution_is_one_file_and_its_problem_an_error(tmp_path):
    put(tmp_path, solution__R="x <- 1", bad__ipynb="{", other__pdf="x")

    assert shape(read_document(tmp_path / "solution.R")) == [("code", "x <- 1", "script")]
    with pytest.raises(SubmissionError, match=r"bad\.ipynb can't be read: it is not valid JSON"):
        read_document(tmp_path / "bad.ipynb")
    for wrong in ("other.pdf", "missing.R", "", "class.zip"):
        with pytest.raises(SubmissionError):
            read_document(tmp_path / wrong)

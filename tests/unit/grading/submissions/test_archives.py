import io
import json
import struct
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grading.submissions import archives
from grading.submissions.reading import read_submissions
from messages.errors import SubmissionError

NOTEBOOK = json.dumps({"cells": [{"cell_type": "markdown", "source": "Sales rose."}]}).encode()


def make_zip(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            archive.writestr(name, content)
    return path


def by_name(path):
    return {submission.name: submission for submission in read_submissions(path)}


def test_a_zip_is_read_as_a_folder_is(tmp_path):
    path = make_zip(
        tmp_path / "class.zip",
        {"b.R": "1", "a.ipynb": NOTEBOOK, "s/x.R": "2", "s/": "", "__MACOSX/._b.R": "", "s/.DS_Store": "", "c.odt": ""},
    )

    submissions = by_name(path)

    assert list(submissions) == ["a.ipynb", "b.R", "c.odt", "s"]
    assert submissions["a.ipynb"].parts[0].text == "Sales rose."
    assert submissions["s"].parts[0].text == "2"
    assert "type .odt can't be read" in submissions["c.odt"].problem


@pytest.mark.parametrize(
    ("members", "names"),
    [
        (["hw1/", "hw1/a.R", "hw1/b.R"], ["hw1/a.R", "hw1/b.R"]),
        (["hw1/jane/a.R", "hw1/bob/b.R"], ["hw1/bob", "hw1/jane"]),
        (["jane/a.R", "jane/notes.md", "jane/data.csv"], ["jane"]),
        (["Jane_7_assignsubmission_file/a.R", "Jane_7_assignsubmission_file/b.R"], ["Jane_7_assignsubmission_file"]),
        (["hw1/a.R", "hw1/b.R", "c.R"], ["c.R", "hw1"]),
    ],
)
def test_one_folder_around_a_class_is_looked_through(tmp_path, members, names):
    path = make_zip(tmp_path / "class.zip", dict.fromkeys(members, "1"))

    assert list(by_name(path)) == names


def test_only_finds_names_inside_a_folder_around_the_class(tmp_path):
    path = make_zip(tmp_path / "class.zip", {"hw/doe_1_2_a.R": "1", "hw/roe_3_4_a.R": "2"})

    assert [submission.name for submission in read_submissions(path, names=["3"])] == ["hw/roe_3_4_a.R"]


@pytest.mark.parametrize(
    "name", ["/etc/x.R", "../x.R", "a/../../x.R", "a\\x.R", "C:x.R", "a//x.R", "a/./x.R", "x\n.R", "\x1b[2Jx.R"]
)
def test_unsafe_paths_are_refused_for_that_member(tmp_path, name):
    path = make_zip(tmp_path / "class.zip", {name: "secret", "fine.R": "1"})

    submissions = read_submissions(path)

    assert [submission.problem for submission in submissions] == [
        "",
        "its path in the zip is unsafe, so it is not read",
    ]
    refused = submissions[1].name
    assert refused.startswith("refused_")
    assert not set(refused) & set("/\\:\n\x1b")


def zipped(members):
    return make_zip(io.BytesIO(), members).getvalue()


def texts(submission):
    return [part.text for part in submission.parts]


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_students_zip_is_read_as_a_folder(tmp_path, as_folder):
    clutter = {"__MACOSX/._a.R": "x", "hw/.Rhistory": "x"}
    work = zipped({"hw/a.R": "1", "hw/b.ipynb": NOTEBOOK, "hw/data.csv": "x"} | clutter)
    members = {"roe_3_4_hw.zip": work, "doe_1_2_hw.zip": zipped({"a.R": "2"}), "s/more.zip": zipped({"x.R": "3"})}
    path = make_zip(tmp_path / "class.zip", members)
    if as_folder:
        path = tmp_path / "class"
        zipfile.ZipFile(tmp_path / "class.zip").extractall(path)

    submissions = by_name(path)

    assert list(submissions) == ["doe_1_2_hw.zip", "roe_3_4_hw.zip", "s"]
    assert texts(submissions["doe_1_2_hw.zip"]) == ["2"]
    assert "1" in texts(submissions["roe_3_4_hw.zip"])
    assert "Sales rose." in texts(submissions["roe_3_4_hw.zip"])
    assert submissions["roe_3_4_hw.zip"].ignored_kinds == (".csv files",)
    assert texts(submissions["s"]) == ["3"]
    assert [one.name for one in read_submissions(path, names=["3"])] == ["roe_3_4_hw.zip"]


def test_the_later_of_a_students_zips_counts(tmp_path):
    path = tmp_path / "class"
    path.mkdir()
    for number, text in ((2, "old"), (9, "new")):
        (path / f"doe_1_{number}_hw.zip").write_bytes(zipped({"a.R": text}))

    (submission,) = read_submissions(path)

    assert texts(submission) == ["new"]
    assert submission.superseded_names == ("doe_1_2_hw.zip",)


def test_a_students_zip_cannot_leave_its_place_nor_grow_without_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBERS", 50)
    path = make_zip(
        tmp_path / "class.zip",
        {
            "a.zip": zipped({"../b.zip/x.R": "2", "/etc/y.R": "3", "fine.R": "1", "inner.zip": zipped({"b.R": "2"})}),
            "b.zip": zipped({"x.R": "mine"}),
            "bomb.zip": zipped({"x.R": b" " * (20 << 20)}),
            "many.zip": zipped({f"{number}.R": "1" for number in range(51)}),
            "nothing.zip": zipped({}),
            "twice.zip": zipped({"in.zip": zipped({"x.R": "1"})}),
        },
    )

    submissions = by_name(path)

    assert texts(submissions["a.zip"]) == ["1"]
    assert "1 file left out: zips inside can't be read" in submissions["a.zip"].notes
    assert texts(submissions["b.zip"]) == ["mine"]
    assert "zip bomb" in submissions["bomb.zip"].problem
    assert "more than 50 files" in submissions["many.zip"].problem
    assert submissions["nothing.zip"].problem == "the zip is empty"
    assert "holds no file that can be read" in submissions["twice.zip"].problem


def test_a_damaged_zip_among_the_files_is_not_opened(tmp_path):
    path = make_zip(tmp_path / "class.zip", {"a.R": "1", "more.zip": b"PK", "s/x.R": "2", "s/more.zip": b"PK"})

    submissions = by_name(path)

    assert submissions["more.zip"].problem == "the zip is damaged: hand it in again"
    assert submissions["s"].notes == ("1 file left out: the zip is damaged: hand it in again",)


def flag(path, name, bits, offsets):
    """Sets flag bits of a member in its local (offset 6) or central (offset 8) header."""
    data = bytearray(path.read_bytes())
    for signature, offset in offsets:
        start = -1
        while (start := data.find(signature, start + 1)) >= 0:
            if name in data[start : start + 80]:
                data[start + offset] |= bits
    path.write_bytes(data)


HEADERS = ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8))


def test_an_encrypted_member_is_a_problem(tmp_path):
    path = make_zip(tmp_path / "class.zip", {"a.R": "1", "b.R": "2"})
    flag(path, b"b.R", 1, HEADERS)

    assert [submission.problem for submission in read_submissions(path)] == [
        "",
        "it is encrypted; hand it in without a password",
    ]


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_without_a_bound_are_a_problem(tmp_path, compression):
    path = make_zip(tmp_path / "class.zip", {"a.R": "1"}, compression)

    assert "compressed in a way that isn't read" in by_name(path)["a.R"].problem


def test_a_link_in_a_zip_is_a_problem(tmp_path):
    info = zipfile.ZipInfo("a.R")
    info.external_attr = 0o120777 << 16
    path = make_zip(tmp_path / "class.zip", [(info, "/etc/passwd")])

    assert by_name(path)["a.R"].problem == "it is a link, not a file"


def test_names_in_utf_8_without_the_mark_and_in_cp437_are_read(tmp_path):
    path = make_zip(tmp_path / "class.zip", {"grXXn.R": "1", "grY_n.R": "2"})
    path.write_bytes(path.read_bytes().replace(b"grXXn", "grün".encode()).replace(b"grY_n", b"gr\x81_n"))

    assert set(by_name(path)) == {"grün.R", "grü_n.R"}


def test_two_members_of_one_name_are_a_problem(tmp_path):
    path = tmp_path / "class.zip"
    with pytest.warns(UserWarning, match="Duplicate name"):
        make_zip(path, [("a.R", "1"), ("a.R", "2"), ("b.R", "3")])

    assert [submission.problem for submission in read_submissions(path)] == [
        "two files have the same name; rename one of the files",
        "",
    ]


def test_a_member_past_the_size_limit_is_a_problem_whatever_its_header_says(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_FILE_BYTES", 1000)
    path = make_zip(tmp_path / "class.zip", {"a.R": "x" * 1001, "b.R": "1"}, zipfile.ZIP_STORED)

    assert [bool(submission.problem) for submission in read_submissions(path)] == [True, False]


def test_a_member_longer_than_its_header_says_is_not_read_past_it(tmp_path):
    path = make_zip(tmp_path / "class.zip", {"a.R": "x" * 5000})
    data = path.read_bytes().replace(struct.pack("<L", 5000), struct.pack("<L", 10))
    path.write_bytes(data)

    assert by_name(path)["a.R"].problem == "it is damaged in the zip; hand it in again"


def test_a_bomb_is_refused_by_its_ratio(tmp_path):
    path = make_zip(tmp_path / "class.zip", {"bomb.txt": b" " * (20 << 20), "b.R": "1"})

    submissions = by_name(path)

    assert "like a zip bomb" in submissions["bomb.txt"].problem
    assert not submissions["b.R"].problem


def test_a_zip_that_expands_to_too_much_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_ZIP_BYTES", 1 << 20)
    path = make_zip(tmp_path / "class.zip", {f"{i}.R": b"x" * 300_000 for i in range(4)})

    with pytest.raises(SubmissionError, match=r"class\.zip expands to more than 1 MiB"):
        read_submissions(path)
    assert len(read_submissions(path, limit=3)) == 3


def test_a_zip_with_too_many_members_is_an_error(tmp_path):
    path = make_zip(tmp_path / "class.zip", {f"{i}.R": "" for i in range(20_001)})

    with pytest.raises(SubmissionError, match=r"holds 20,001 files, but at most 20,000 are read"):
        read_submissions(path)


def test_one_student_with_too_many_files_does_not_stop_the_class(tmp_path):
    many = {f"hw/Zoe_7_assignsubmission_file/{i}.R": "" for i in range(2_001)}
    others = {f"hw/Ada_{i}_assignsubmission_file/a.R": "1" for i in range(100, 200)}

    submissions = by_name(make_zip(tmp_path / "class.zip", many | others))

    assert submissions.pop("hw/Zoe_7_assignsubmission_file").problem.startswith("the folder holds more than 2,000")
    assert [one.problem for one in submissions.values()] == [""] * 100


def test_a_directory_too_large_for_the_members_allowed_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_MAX_DIRECTORY_BYTES", 1000)
    path = make_zip(tmp_path / "class.zip", {f"{i}.R": "1" for i in range(100)})

    with pytest.raises(SubmissionError, match="its list of files is too large"):
        read_submissions(path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x05\x06" + b"\0" * 17, b"PK\x03\x04" * 10, "a bad name"])
def test_a_bad_zip_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "class.zip"
    if isinstance(content, str):  # a name that is marked as UTF-8, and isn't
        content = make_zip(path, {"grün.R": "1"}).read_bytes().replace("ü".encode(), b"\xff\xff")
    path.write_bytes(content)

    with pytest.raises(SubmissionError, match=r"class\.zip is not a readable zip"):
        read_submissions(path)


def test_a_zip_without_anything_readable_is_an_error(tmp_path):
    for members in ({}, {"a.odt": "x"}):
        with pytest.raises(SubmissionError, match="holds no submission that can be read"):
            read_submissions(make_zip(tmp_path / "class.zip", members))


VALID = zipped({"a.R": "x <- 1", "s/b.ipynb": NOTEBOOK, "s/c.R": "y" * 200})
EDITS = st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=6)


def check_never_raises_otherwise(path, content):
    path.write_bytes(content)
    try:
        submissions = read_submissions(path)
    except SubmissionError:
        return
    for submission in submissions:
        assert not (submission.problem and submission.parts)
        assert "bug" not in submission.problem
        assert submission.name.encode()


@settings(max_examples=300)
@given(edits=EDITS, cut=st.integers(0, len(VALID)) | st.none())
def test_a_damaged_zip_is_an_error_or_its_submissions_problem(tmp_path_factory, edits, cut):
    content = bytearray(VALID)
    for place, value in edits:
        content[place] = value

    check_never_raises_otherwise(tmp_path_factory.getbasetemp() / "class.zip", bytes(content[:cut]))


@given(content=st.binary(max_size=300))
def test_arbitrary_bytes_as_a_zip_are_an_error(tmp_path_factory, content):
    check_never_raises_otherwise(tmp_path_factory.getbasetemp() / "class.zip", content)

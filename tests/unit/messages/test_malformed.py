"""Malformed input of each kind gives a row with a reason, and the rest of the class is graded."""

import csv
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir import cli
from tests.support.homework import RUBRIC
from tests.support.processes import SIMULATED_MODEL, config_text


def notebook(output: str) -> str:
    cell = {
        "cell_type": "code",
        "source": "print(1)",
        "execution_count": 1,
        "metadata": {},
        "outputs": [{"output_type": "stream", "name": "stdout", "text": output}],
    }
    metadata = {"kernelspec": {"name": "python3", "language": "python"}, "authors": [{"name": "Nobody Known"}]}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": [cell]})


def damaged(path: Path, member: str) -> None:
    """Change a byte of one member's data, so that its checksum is wrong."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(member)
    data[info.header_offset + 30 + len(member) + 5] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("class") / "class.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("good_101_901_hw.R", "x <- mean(c(1, 2))\n")
        archive.writestr("bomb_102_902_hw.ipynb", b"0" * (63 << 20))
        archive.writestr("encoding_103_903_hw.R", "y <- 'Größe'\n".encode("cp1252"))
        archive.writestr("long_104_904_hw.ipynb", notebook("0123456789" * 60_000))
        archive.writestr("no-id.R", "z <- 3\n")
        archive.writestr("cut_105_905_hw.ipynb", notebook("1")[:-40])
        archive.writestr("binary_106_906_hw.R", bytes(range(256)) * 20)
        archive.writestr("nested_107_907_hw.zip", b"PK")
        archive.writestr("broken_108_908_hw.R", "".join(f"v{n} <- {n * 7919}\n" for n in range(400)))
        archive.writestr("../../escape_109_909_hw.R", "x <- 1\n")
    damaged(path, "broken_108_908_hw.R")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepared(tmp_path, monkeypatch)


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    (folder / "kvasir.toml").write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    (folder / "rubric.yaml").write_text(RUBRIC, "utf-8")
    return folder


@pytest.fixture(scope="module")
def once(handed_in: Path) -> Iterator[Path]:
    """Where that class was graded."""
    with pytest.MonkeyPatch.context() as patch:
        folder = prepared(handed_in.parent, patch)
        code = cli.run_command(["grade", str(handed_in), "--rubric", "rubric.yaml", "--out", "out", "--quiet"])
        assert code == cli.EXIT_FAILURE
        yield folder


def test_every_member_has_its_row_and_the_good_ones_their_grades(once: Path) -> None:
    with (once / "out/grades.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["submission"].partition("_")[0]: row for row in csv.DictReader(file)}

    assert len(rows) == 10
    assert {name for name, row in rows.items() if row["state"] == "graded"} == {"good", "encoding", "long"}
    assert all(row["points"] == "" and row["reason"] for row in rows.values() if row["state"] != "graded")
    assert "nothing in its name says whose it is" in rows["no-id.R"]["reason"]
    assert "zip bomb" in rows["bomb"]["reason"]
    assert "Windows-1252" in rows["encoding"]["remarks"]
    assert "tokens of output" in rows["long"]["remarks"]
    assert "not valid JSON" in rows["cut"]["reason"]
    assert "damaged in the zip" in rows["broken"]["reason"]
    assert "unsafe" in rows["refused"]["reason"]


def test_an_export_lists_who_has_no_id_and_who_failed(once: Path, capsys: pytest.CaptureFixture[str]) -> None:
    students = "good,101,,\nbomb,102,,\n"
    (once / "book.csv").write_text(f"Student,ID,Section,H (7)\n    Points Possible,,,\n{students}", "utf-8")
    canvas = ("export", "out", "--format", "canvas", "--gradebook", "book.csv", "--assignment", "7")
    canvas += ("--include-unreviewed",)
    assert cli.run_command([*canvas, "--to", "c.csv"]) == cli.EXIT_FAILURE

    shown = capsys.readouterr().out
    assert "no-id.R: failed: nothing in its name says whose it is" in shown
    assert "bomb_102_902_hw.ipynb: failed" in shown
    rows = list(csv.reader(io.StringIO((once / "c.csv").read_text("utf-8"), newline="")))
    points = {row[1]: row[-1] for row in rows[2:]}
    assert points["101"] != ""
    assert points["102"] == ""
    assert cli.run_command(["export", "out", "--format", "feedback", "--as", "html"]) == cli.EXIT_FAILURE
    assert cli.run_command(["export", "out", "--format", "csv"]) == cli.EXIT_FAILURE
    assert cli.run_command(["export", "out", "--format", "moodle"]) == cli.EXIT_USAGE


def test_names_in_metadata_reach_no_queue_and_no_result(once: Path) -> None:
    for file in ("results.jsonl", "submitted.jsonl"):
        text = (once / "out" / file).read_text("utf-8")
        assert "Nobody Known" not in text
        assert "_hw." not in text  # file names stay in batch.json and the grades


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 no zip", b"x" * 5000])
def test_a_class_that_is_no_zip_is_one_sentence(folder: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "class.zip").write_bytes(data)

    assert cli.run_command(["grade", "class.zip", "--rubric", "rubric.yaml", "--out", "out"]) == cli.EXIT_USAGE
    assert "not a readable zip" in capsys.readouterr().err


def test_a_rubric_that_does_not_add_up_is_refused_before_anything_runs(
    folder: Path, handed_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "wrong.yaml").write_text(RUBRIC + "total: 99\n", "utf-8")

    assert cli.run_command(["grade", str(handed_in), "--rubric", "wrong.yaml", "--out", "out"]) == cli.EXIT_USAGE
    assert "'total' is 99, but the criteria add up to 5" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_several_samples_come_from_one_job(folder: Path) -> None:
    (folder / "in").mkdir()
    (folder / "in/doe_101_901_hw.R").write_text("x <- mean(c(1, 2))", "utf-8")

    wanted = ["--samples", "3", "--out", "out", "--quiet"]
    assert cli.run_command(["grade", "in", "--rubric", "rubric.yaml", *wanted]) == 0

    results = [json.loads(line) for line in (folder / "out/results.jsonl").read_text("utf-8").splitlines()]
    assert [len(result["more_texts"]) for result in results] == [2, 2]
    [grade] = json.loads((folder / "out/grades.json").read_text("utf-8"))["grades"]
    assert all(len(criterion["sampled"]) == 3 for criterion in grade["criteria"])
    assert cli.run_command(["results", "out"]) == 0

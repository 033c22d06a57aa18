"""Pictures are found where they stand, of one submission at a time, whatever the notebook calls a picture."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grading.submissions.figures import MAX_FIGURE_BYTES, MAX_FIGURES, figures_of, place_of
from grading.submissions.reading import read_submissions

PNG, JPEG = b"\x89PNG and so on", b"\xff\xd8 and so on"


def output(**forms: Any) -> dict[str, Any]:
    named = {f"image/{kind}" if kind in ("png", "jpeg") else kind: said for kind, said in forms.items()}
    return {"output_type": "display_data", "metadata": {}, "data": named}


def code(*outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": "plot()", "outputs": list(outputs)}


def said(data: bytes) -> str:
    return base64.b64encode(data).decode()


def notebook(path: Path, *cells: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"nbformat": 4, "metadata": {}, "cells": list(cells)}), "utf-8")
    return path


def test_each_picture_knows_the_output_that_it_belongs_to(tmp_path: Path) -> None:
    stream = {"output_type": "stream", "name": "stdout", "text": "one\n"}
    attached = {"a.png": {"image/png": said(b"attached")}}
    markdown = {"cell_type": "markdown", "metadata": {}, "source": "See", "attachments": attached}
    cells = [
        code(stream, stream, output(png=said(PNG), jpeg=said(JPEG), **{"text/plain": "<Figure>"})),
        markdown,
        code(output(jpeg=[said(JPEG)[:8] + "\n", said(JPEG)[8:]])),
        code(output(png="", **{"image/svg+xml": "<svg onload=alert(1)>", "text/html": "<img src=x>"})),
    ]
    notebook(tmp_path / "a.ipynb", *cells)

    found = figures_of(tmp_path, "a.ipynb")

    assert [(figure.place, figure.data) for figure in found] == [
        ((0, 1, 2), PNG),  # the two pieces of the stream are one output
        ((0, 2, 0), b"attached"),
        ((0, 3, 1), JPEG),
        ((0, 4, 1), b""),
    ]
    [submission] = read_submissions(tmp_path)
    assert place_of(submission.parts[2].location) == (0, 1, 2)
    assert place_of("chunk 3") is None


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_folder_each_notebook_is_read_and_of_the_class_only_one(tmp_path: Path, packed: bool) -> None:
    for who in ("ada", "bob"):
        for number in (1, 2):
            notebook(tmp_path / "class" / who / f"{number}.ipynb", code(output(png=said(f"{who} {number}".encode()))))
        (tmp_path / "class" / who / "notes.txt").write_text("hello")
    (tmp_path / "class/bob/2.ipynb").write_text("{")
    path = (
        Path(shutil.make_archive(str(tmp_path / "class"), "zip", tmp_path / "class")) if packed else tmp_path / "class"
    )

    assert [(one.place, one.data) for one in figures_of(path, "ada")] == [
        ((1, 1, 1), b"ada 1"),
        ((2, 1, 1), b"ada 2"),
    ]
    assert [one.data for one in figures_of(path, "bob")] == [b"bob 1"]
    assert figures_of(path, "eve") == figures_of(tmp_path / "nowhere", "ada") == []


def test_of_six_hundred_pictures_the_first_are_taken(tmp_path: Path) -> None:
    notebook(tmp_path / "a.ipynb", code(*(output(png=said(f"number {number}".encode())) for number in range(600))))
    found = figures_of(tmp_path, "a.ipynb")
    assert [figure.data for figure in found] == [f"number {number}".encode() for number in range(MAX_FIGURES)]


@pytest.mark.parametrize("lines", [False, True])
def test_what_is_too_large_or_no_base64_has_no_bytes(tmp_path: Path, lines: bool) -> None:
    large = said(bytes(MAX_FIGURE_BYTES + 1))
    bad = [large, 'a"b', "a", "taken 7", "\u00e4", 7, None, {"a": 1}]
    notebook(tmp_path / "a.ipynb", *(code(output(png=[one] if lines else one)) for one in bad))
    found = figures_of(tmp_path, "a.ipynb")
    assert len(found) == len(bad)
    assert not any(b"\x89" in figure.data or len(figure.data) > 10 for figure in found)

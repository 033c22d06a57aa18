"""A student's work as the review shows it: pictures drawn again, evidence marked, and nothing of theirs run."""

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from desk import assignments
from grading.submissions.figures import Figure
from grading.submissions.reading import read_submissions
from infra.config.settings import load_settings
from kvasir.class_run import request_from
from tests.support.browser import AT_REST, PATIENCE_S, Browser
from tests.support.desk import answer, plan
from tests.support.desk_page import DeskPage, new_assignment
from tests.support.homework import RUBRIC
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # Pillow comes with the ui extra: so imports of what needs it are late

SCRIPT = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
FRAME = "       city  amount\n0  New York   10.50\n1  Old Town    3.25"
HOSTILE_FRAME = [(" ", "a", "b"), ("1", SCRIPT.replace(" ", ""), "2"), ("2", "x", "3")]
CODE = 'def mean(values):\n    """The mean."""\n    return sum(values) / len(values)'
# What of the work scrolls by itself: its height or width is more than what is seen of it.
SCROLLS_INSIDE = """
[...document.querySelectorAll(".kv-work *")].filter((e) => /auto|scroll/.test(
  getComputedStyle(e).overflowX + getComputedStyle(e).overflowY) && e.tagName !== "TEXTAREA"
  && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)).map((e) => e.outerHTML.slice(0, 200))
"""


def png(width: int, height: int, rows: bytes = b"", *more: tuple[bytes, bytes]) -> bytes:
    """A PNG of one bit a pixel, by the specification: its rows are whatever is said, and come after `more` chunks."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = rows or (b"\0" + bytes(-(-width // 8))) * height
    chunks = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def jpeg(scans: int = 0) -> bytes:
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (20, 10), "red").save(made, "JPEG", comment=SCRIPT, progressive=True)
    return made.getvalue() + b"\xff\xda" * scans


def notebook(*cells: dict[str, Any]) -> str:
    kernel = {"kernelspec": {"name": "python3", "language": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": list(cells)})


def code(source: str, *data: dict[str, Any]) -> dict[str, Any]:
    outputs = [{"output_type": "display_data", "metadata": {}, "data": forms} for forms in data]
    return {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": source, "outputs": outputs}


def text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def said(data: bytes) -> str:
    return base64.b64encode(data).decode()


def shown(*pictures: bytes) -> list[tuple[int, int]]:
    """(width, height) of those of these pictures that can be shown."""
    from desk.plots import plots

    return [
        (one.width, one.height) for one in plots(Figure((0, 1, number), one) for number, one in enumerate(pictures))
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        png(20, 10)[:-30],
        png(20, 10).replace(b"IDAT", b"IDOT"),
        png(20, 10, b"\0"),
        png(50_000, 50_000, b"\0"),
        png(2**31 - 1, 1, b"\0"),
        png(20, 10, b"", (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 27)))),
        png(20, 10, b"", (b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 27))))[:-40],
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'></svg>",
        b"GIF89a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    ],
    ids=range(12),
)
def test_what_is_no_picture_or_too_much_of_one_is_not_shown(data: bytes) -> None:
    assert shown(data, png(20, 10)) == [(20, 10)]


def test_a_jpeg_of_many_scans_is_not_decoded() -> None:
    assert shown(jpeg(), jpeg(scans=100)) == [(20, 10)]


def test_what_is_shown_is_our_own_file_with_nothing_but_their_pixels() -> None:
    from PIL import Image

    from desk.plots import plots

    hidden = SCRIPT.encode()
    polyglots = [
        png(20, 10, b"", (b"tEXt", b"Comment\0" + hidden), (b"iCCP", b"a\0\0" + hidden)) + hidden,
        jpeg() + hidden,
    ]
    made = plots(Figure((0, 1, number), data) for number, data in enumerate(polyglots))
    for plot, kind in zip(made, ("PNG", "JPEG"), strict=True):
        start, _, encoded = plot.source.partition(",")
        assert start == f"data:image/{kind.lower()};base64"
        data = base64.b64decode(encoded)
        assert b"script" not in data
        with Image.open(io.BytesIO(data)) as picture:
            assert (picture.format, picture.size, picture.mode) == (kind, (20, 10), "RGB")


def test_pictures_share_one_allowance_and_large_ones_are_made_smaller() -> None:
    large = png(4000, 3000)
    assert shown(*[large] * 6) == [(900, 675)] * 4


def test_what_is_seen_through_is_seen_on_white() -> None:
    from PIL import Image

    from desk.plots import plots

    made = io.BytesIO()
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(made, "PNG")
    [plot] = plots([Figure((0, 1, 1), made.getvalue())])
    with Image.open(io.BytesIO(base64.b64decode(plot.source.partition(",")[2]))) as picture:
        assert picture.getpixel((0, 0)) == (255, 255, 255)


def test_pictures_stand_below_their_output_and_evidence_is_marked_in_code_and_table(tmp_path: Path) -> None:
    from desk.pages.work import draw_work

    cells = [
        text(f"## One\n{SCRIPT}"),
        code(
            CODE, {"text/plain": FRAME, "text/html": SCRIPT}, {"text/plain": "<Figure>", "image/png": said(png(20, 10))}
        ),
        code("plot()", {"image/png": said(b"broken")}, {"image/svg+xml": "<svg/>"}),
        text("The end"),
    ]
    (tmp_path / "a.ipynb").write_text(notebook(*cells), "utf-8")
    [submission] = read_submissions(tmp_path)
    quotes = {"works": "return sum(values) / len(values)", "clear": "Old Town 3.25"}

    blocks = draw_work(tmp_path, submission, quotes)

    assert [block["kind"] for block in blocks if block["kind"] != "caption"] == [
        *("prose", "code", "table", "output", "plot", "code", "prose")
    ]
    prose, code_cell, table, output, plot, _, last = (block for block in blocks if block["kind"] != "caption")
    assert prose["lines"] == ["## One", SCRIPT]
    assert code_cell["lines"][0] == (("k", "def"), ("", " mean(values):"))
    assert (code_cell["marks"], table["marks"], prose["marks"]) == ({"2": "works"}, {"2": "clear"}, {})
    assert table["lines"] == [("", "city", "amount"), ("0", "New York", "10.50"), ("1", "Old Town", "3.25")]
    assert output["lines"] == ["<Figure>"]
    assert (plot["text"], plot["width"], plot["height"]) == ("picture, cell 2, output 2", 20, 10)
    assert last["lines"] == ["The end"]
    words = "4 pictures, seen by no model; 3 of them can't be shown here. A click on one makes it larger."
    assert blocks[-1]["text"] == words


def test_all_of_a_long_output_is_shown_when_all_is_asked_for(tmp_path: Path) -> None:
    from desk.pages.work import draw_work, is_cut

    rows = [f"row {number} of what a program printed" for number in range(4_000)]
    output = {"output_type": "stream", "name": "stdout", "text": "\n".join(rows)}
    cell = {"cell_type": "code", "metadata": {}, "execution_count": 1, "source": "many()", "outputs": [output]}
    (tmp_path / "a.ipynb").write_text(notebook(cell), "utf-8")
    [submission] = read_submissions(tmp_path)
    assert is_cut(submission)

    def lines(is_whole: bool) -> list[str]:
        blocks = draw_work(tmp_path, submission, {}, is_whole)
        return [line for block in blocks if block["kind"] == "output" for line in block["lines"]]

    assert lines(is_whole=True)[-1] == rows[-1] == "row 3999 of what a program printed"
    assert len(lines(is_whole=False)) < len(rows) // 4


# --- in a browser


@pytest.fixture(scope="module")
def graded(desk: DeskPage) -> Path:
    """One student, whose notebook does what it can to be more than text and pictures."""
    work = desk.home.parent / "hostile"
    work.mkdir()
    polyglot = png(60, 40, b"", (b"tEXt", b"a\0" + SCRIPT.encode())) + SCRIPT.encode()
    cells = [
        text(f"# Hello {SCRIPT}\n\n| a | b |\n|---|---|\n| {SCRIPT} | 2 |\n\n{'wide' * 400}"),
        code(CODE + f"\nname = '{SCRIPT}'\n# {'long ' * 300}", {"text/plain": FRAME, "text/html": SCRIPT}),
        code(
            "def draw(): pass",
            {"image/png": said(polyglot), "text/html": SCRIPT},
            {"image/png": said(png(50_000, 50_000, b"\0"))},
        ),
        code("many()", *({"image/png": said(png(30, 20))} for _ in range(600))),
        code(
            "print()",
            {"text/plain": "\n".join(f"{row} {cell.ljust(len(SCRIPT))} {last}" for row, cell, last in HOSTILE_FRAME)},
        ),
    ]
    (work / "student0_1_0_hw.ipynb").write_text(notebook(*cells), "utf-8")
    folder = new_assignment(desk, "Means", work, RUBRIC)
    rubric = Path(assignments.read_inputs(folder).rubric)
    assignment = plan(folder, request_from(load_settings(config=desk.config), work, rubric))
    answer(folder, assignment, [0], evidence="return sum(values) / len(values)")
    return folder


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_hostile_notebook_is_text_and_pictures(
    desk: DeskPage, graded: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    with Browser(tmp_path / "browser", width, 900) as browser:
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open(desk.at(graded, "Review"))
        browser.wait_for("Final points")
        wait_until(lambda: browser.evaluate(AT_REST), "the page has come to rest", PATIENCE_S)
        seen = "[...document.querySelectorAll('.work-plot')].map((e) => e.naturalWidth)"
        wait_until(lambda: browser.evaluate(seen) == [60] + [30] * 38, "the pictures are there", PATIENCE_S)
        assert browser.evaluate("document.title") == "Kvasir grading desk"
        assert browser.evaluate("document.querySelectorAll('[onerror], [src=x]').length") == 0
        assert "603 pictures, seen by no model; 564 of them can't be shown here." in browser.text()
        assert (
            browser.evaluate("document.querySelector('.work-code mark').innerText.trim()")
            == CODE.split("\n")[2].strip()
        )
        assert browser.evaluate("[...document.querySelectorAll('.work-table th')].map((e) => e.innerText)") == [
            *("a", "b"),
            *("city", "amount"),
            *("a", "b"),
        ]
        assert browser.evaluate(SCROLLS_INSIDE) == []
        tiny = "document.querySelectorAll('.work-plot')[1].getBoundingClientRect().width"
        assert browser.evaluate(tiny) == 30
        browser.press("css", ".work-plot", nth=1)
        assert browser.evaluate(tiny) > 200, "a click makes it larger"
        browser.press("css", ".work-plot", nth=1)
        assert browser.evaluate(tiny) == 30
        assert browser.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= width
        colour = "getComputedStyle(document.querySelector('.work-k')).color"
        assert browser.evaluate(colour) == ("rgb(138, 31, 156)" if scheme == "light" else "rgb(224, 160, 240)")
        assert "Traceback" not in browser.text() + desk.text()

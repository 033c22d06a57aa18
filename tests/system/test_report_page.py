"""The report in a real browser: a phone's width is enough, and hostile work stays text."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from grading.points import Grade, grade_submission
from grading.prompts.answers import ParsedAnswer, criterion_grade
from grading.report.page import render_page
from grading.rubric.rubric import Criterion, Rubric
from grading.submissions.reading import Submission, SubmissionPart
from grading.submissions.truncation import Cut
from producers.storage.private import write_atomically
from tests.support.browser import QUIET

pytestmark = pytest.mark.system

PHONE = 360  # CSS pixels, the narrowest phone in common use
LONG_WORD = "a_file_name_without_any_place_to_break_" * 4
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"></details></main>"
RUBRIC = Rubric(
    "Assignment 4: Loops, functions and a first regression",
    "",
    tuple(
        Criterion(f"criterion_{i}", f"Does what task {i} asks for, with {LONG_WORD}", 4, "", "code", 0.5)
        for i in range(12)
    ),
    "d" * 32,
)

# A desktop browser's window can't be as narrow as a phone's: the page goes into a frame that is.
FRAME = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="page" style="border:0;width:{width}px;height:{height}px" srcdoc="{page}"></iframe>
<script>
addEventListener("load", function () {{
  var page = document.getElementById("page").contentDocument;
  var button = page.getElementById("all");
  var closed = page.querySelectorAll("details[open]").length;
  button.click();
  var seen = {{
    width: page.documentElement.clientWidth,
    scrollWidth: page.documentElement.scrollWidth,
    title: page.title,
    images: page.querySelectorAll("img").length,
    scripts: page.querySelectorAll("script").length,
    handlers: page.querySelectorAll("[onerror]").length,
    opened: page.querySelectorAll("details[open]").length - closed,
    styled: page.defaultView.getComputedStyle(page.querySelector(".facts")).display,
    text: page.body.innerText,
  }};
  document.body.setAttribute("data-seen", JSON.stringify(seen));
}});
</script></body>"""


def class_of_three() -> list[Grade]:
    submission = Submission(
        HOSTILE, "R", (SubmissionPart("code", HOSTILE, "cell 1"),), 2, ("3 of 9 cells were never run",)
    )
    said = {"evidence": HOSTILE, "feedback": HOSTILE}
    answer = ParsedAnswer({criterion.id: criterion_grade(criterion, 2.5, **said) for criterion in RUBRIC.criteria})
    cuts = (Cut("cell 9", "output", 100, 12_345),)
    hostile = grade_submission(HOSTILE, RUBRIC, {"code": answer}, submission, cuts)
    unread = Submission(LONG_WORD, "", (), problem=f"not a notebook: {LONG_WORD}")
    return [
        hostile,
        grade_submission(LONG_WORD, RUBRIC, {}, unread),
        grade_submission("empty", RUBRIC, {}, Submission("empty", "", ())),
    ]


def browse(folder: Path, file: Path, *what: str) -> str:
    """Run Chromium on a local file; returns what it prints."""
    program = shutil.which("chromium")
    assert program, "Chromium is missing: apt-get install chromium"
    command = [
        program,
        "--headless",
        *QUIET,
        f"--user-data-dir={folder / 'profile'}",
        *what,
        file.as_uri(),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def framed(folder: Path, height: int) -> Path:
    facts = [("Code model", "qwen3-coder:30b"), ("Time", "41 min"), ("Note", HOSTILE)]
    page = render_page(
        class_of_three(), RUBRIC, facts, "These are not real grades: the demonstration model wrote them."
    )
    file = folder / "frame.html"
    write_atomically(file, FRAME.format(width=PHONE, height=height, page=escape(page)))
    return file


def seen_in(folder: Path) -> dict[str, Any]:
    dom = browse(folder, framed(folder, 800), "--virtual-time-budget=5000", "--dump-dom")
    match = re.search(r'data-seen="([^"]*)"', dom)
    assert match, dom[-2000:]
    seen: dict[str, Any] = json.loads(unescape(match.group(1)))
    return seen


def test_the_report_reads_on_a_phone_and_hostile_work_stays_text(tmp_path: Path) -> None:
    seen = seen_in(tmp_path)

    assert seen["width"] == PHONE
    assert seen["scrollWidth"] == PHONE, "the page scrolls sideways"
    assert seen["styled"] == "grid", "the content security policy refused the page's own style"
    assert seen["opened"] == 3, "the page's own script did not open the submissions"
    assert HOSTILE in seen["text"]
    assert (seen["images"], seen["handlers"], seen["scripts"]) == (0, 0, 1)
    assert seen["title"] == f"{RUBRIC.title} · grades"


def test_the_report_can_be_pictured(tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    browse(tmp_path, framed(tmp_path, 1200), f"--window-size={PHONE},1200", f"--screenshot={picture}")

    data = picture.read_bytes()

    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000, "the picture is all but blank"

"""The pictures in docs/how-to/desk.md: grades the example class with the demo's model, in the desk, and looks at it.

    python -m docs.make_screenshots

Needs Chromium and the extra `ui`. The pictures go to docs/screenshots, in few colours: each stays below 150 kB. The
feedback in the picture of a review is a person's (docs/pictures.py), since the model knows a dozen sentences.
"""

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image  # comes with Streamlit

from desk.assignments import grading_work
from docs.pictures import FEEDBACK, FOLDER, ROOT, SUMMARY, note
from grading.reviews import Override, append_override
from tests.support.browser import Browser
from tests.support.desk_page import UPLOADS, DeskPage
from tests.support.homework import journal
from tests.support.waiting import wait_until

HOMEWORK = ROOT / "examples/homework"
REVIEWED = "hollowayhettie_48108_910008_riverside.py"
MAX_BYTES = 150_000
PATIENCE_S = 400.0


def main() -> None:
    """Go through the desk as docs/how-to/desk.md does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            DeskPage(folder, ROOT / "examples/demo.toml", folder / "desk") as desk,
            Browser(folder / "browser", 1400, 1000) as browser,
        ):
            walk(browser, desk, folder)


def walk(browser: Browser, desk: DeskPage, folder: Path) -> None:
    """Every step of the page, with its picture."""
    assignment = folder / "desk/riverside-outfitters"
    browser.open(desk.url)
    browser.wait_for("New assignment")
    browser.fill("Name", "Riverside Outfitters")
    submissions = shutil.make_archive(str(folder / "submissions"), "zip", HOMEWORK / "submissions")
    files = [Path(submissions), *(HOMEWORK / name for name in ("rubric.yaml", "solution.ipynb", "template.ipynb"))]
    for label, path in zip(UPLOADS, files, strict=True):
        browser.upload(label, path)
        browser.wait_for(path.name)
    browser.click("Create")
    browser.wait_for("Look before you grade")
    browser.click("Dry run")
    browser.wait_for("tokens are counted with", PATIENCE_S)
    keep(browser, "dry-run")
    browser.click("Trial")
    browser.wait_for("All 5 submissions of this run", PATIENCE_S)
    with halted(browser, assignment, results=18):
        browser.wait_for("being graded, ", PATIENCE_S)
        browser.evaluate("document.querySelector('[data-testid=stMain]').scrollTo(0, 100000)")
        keep(browser, "grading", "being graded, ")
    browser.wait_for("All 16 submissions of this run", PATIENCE_S)
    bound(browser)
    review(browser, desk, assignment)
    browser.click("Regrade")
    browser.wait_for("The class is graded with this rubric")
    keep(browser, "rubric", "points in all")
    browser.click("Results")
    browser.wait_for("Requests for another look")
    keep(browser, "results")
    browser.click("Export")
    browser.click("Make the file")
    browser.wait_for("Left blank")
    keep(browser, "export")


@contextmanager
def halted(browser: Browser, assignment: Path, results: int) -> Iterator[None]:
    """Grade the class up to so many results, and on at the end: the demo's model is done within two seconds."""
    browser.click("Grade all")
    wait_until(lambda: len(journal(assignment)) >= results, "half is graded", PATIENCE_S, poll_s=0.01)
    record = grading_work(assignment).record()
    assert record is not None
    os.killpg(record.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(record.pid, signal.SIGCONT)


def bound(browser: Browser) -> None:
    """Draw a sample, and grade the first two criteria of the first one by hand."""
    browser.click("Bound")
    browser.wait_for("can be drawn")
    browser.fill("Your name", "Prof. Wren")
    browser.press("css", "[data-testid=stMain] [data-testid=stSelectbox] input")
    browser.click("15")
    browser.click("Draw")
    browser.wait_for("Prof. Wren drew")
    browser.fill("Points for n_doubled", "2")
    browser.fill("Points for n_incomplete", "1")
    browser.evaluate("document.querySelector('[data-testid=stMain]').scrollTo(0, 0)")
    keep(browser, "bound", "graded by hand")


def review(browser: Browser, desk: DeskPage, assignment: Path) -> None:
    """Look at one submission, and write a person's feedback over the model's."""
    jobs = json.loads((assignment / "batch.json").read_text("utf-8"))["jobs"]
    item = next(job["item_id"].rpartition(".")[0] for job in jobs if job["name"] == REVIEWED)
    append_override(
        assignment,
        *(
            Override(item, criterion, 1 if criterion == "share_churned" else None, words, "I read it", "Prof. Wren")
            for criterion, words in FEEDBACK.items()
        ),
        Override(item, None, None, SUMMARY, "I read it", "Prof. Wren"),
    )
    browser.open(desk.at(assignment, "Review") + f"&submission={item}")
    browser.wait_for("Final points")
    keep(browser, "review", feedback=(*FEEDBACK.values(), SUMMARY))


def keep(browser: Browser, name: str, words: str = "", feedback: tuple[str, ...] = ()) -> None:
    """The page as it is once it has come to rest, with these words on it."""
    browser.wait_gone("Running")
    path = FOLDER / f"{name}.png"
    # Tables are drawn on canvases after the page's own text: two frames later they are there.
    browser.evaluate("new Promise((done) => setTimeout(done, 1500))")
    browser.picture(path)
    if words not in browser.text():
        raise SystemExit(f"{path} does not show {words!r}: it was gone before the picture was taken")
    for colours in (128, 64, 32, 16):
        Image.open(path).convert("RGB").quantize(colours).save(path, optimize=True)
        if path.stat().st_size < MAX_BYTES:
            note(path, "python -m docs.make_screenshots", "kvasir-demo", feedback)
            return
    raise SystemExit(f"{path} is larger than {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()

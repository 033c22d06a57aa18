"""The pictures in docs/desk.md: grades the example class with a simulated model, in the desk, and looks at it.

    python -m docs.make_screenshots

Needs Chromium and the extra `ui`. The pictures go to docs/screenshots, in few colours: each stays below 150 kB.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from PIL import Image  # comes with Streamlit

from tests.support.browser import Browser
from tests.support.desk_page import DeskPage
from tests.support.homework import journal
from tests.support.processes import ROOT, Model, config_text
from tests.support.waiting import wait_until

HOMEWORK = ROOT / "examples/homework"
PICTURES = ROOT / "docs/screenshots"
NOTICE = "These are not real grades: a simulated model wrote them."
MAX_BYTES = 150_000
PATIENCE_S = 400.0


def main() -> None:
    """Go through the desk as docs/desk.md does."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "kvasir.toml"
        model = config_text({"simulated": Model("simulated", "sim:prefill=3000,decode=300,scale=1", 32768)})
        config.write_text(model.replace("[grading]", f'[grading]\nnotice = "{NOTICE}"', 1), "utf-8")
        with DeskPage(folder, config, folder / "desk") as desk, Browser(folder / "browser", 1400, 1000) as browser:
            walk(browser, desk, folder)


def walk(browser: Browser, desk: DeskPage, folder: Path) -> None:
    """Every step of the page, with its picture."""
    browser.open(desk.url)
    browser.wait_for("New assignment")
    browser.fill("Name", "Riverside Outfitters")
    submissions = shutil.make_archive(str(folder / "submissions"), "zip", HOMEWORK / "submissions")
    files = [Path(submissions), *(HOMEWORK / name for name in ("rubric.yaml", "solution.ipynb", "template.ipynb"))]
    for number, path in enumerate(files):
        browser.upload(number, path)
        browser.wait_for(path.name)
    browser.click("Create")
    browser.wait_for("Look before you grade")
    browser.click("Dry run")
    browser.wait_for("counted with the model's tokenizer", PATIENCE_S)
    keep(browser, "dry-run")
    browser.click("Trial")
    browser.wait_for("All 5 submissions of this run", PATIENCE_S)
    browser.click("Grade all")
    browser.wait_for("of 16 submissions; about", PATIENCE_S)
    browser.evaluate("document.querySelector('[data-testid=stMain]').scrollTo(0, 100000)")
    wait_until(lambda: 18 <= len(journal(folder / "desk/riverside-outfitters")) <= 26, "half is graded", PATIENCE_S)
    keep(browser, "grading", "of 16 submissions; about")
    browser.wait_for("All 16 submissions of this run", PATIENCE_S)
    browser.click("Review")
    browser.wait_for("Points for n_doubled")
    browser.fill("Points for n_doubled", "2")
    browser.fill("Feedback on n_doubled", "You counted the doubled order lines, and your count is right.")
    browser.fill("Reason for the change", "I ran it")
    browser.click("Save the change")
    browser.wait_for("Decisions")
    keep(browser, "review")
    browser.click("Results")
    browser.wait_for("Agreement between model and person")
    keep(browser, "results")
    browser.click("Export")
    browser.click("Make the file")
    browser.wait_for("left blank")
    keep(browser, "export")


def keep(browser: Browser, name: str, words: str = "") -> None:
    """The page as it is once it has come to rest, with these words on it."""
    browser.wait_gone("Running")
    path = PICTURES / f"{name}.png"
    # Tables are drawn on canvases after the page's own text: two frames later they are there.
    browser.evaluate("new Promise((done) => setTimeout(done, 1500))")
    browser.picture(path)
    if words not in browser.text():
        raise SystemExit(f"{path} does not show {words!r}: it was gone before the picture was taken")
    for colours in (128, 64, 32, 16):
        Image.open(path).convert("RGB").quantize(colours).save(path, optimize=True)
        if path.stat().st_size < MAX_BYTES:
            return
    raise SystemExit(f"{path} is larger than {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()

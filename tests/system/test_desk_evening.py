"""An instructor's evening in a real browser, from the upload to the file for the learning platform."""

import csv
import io
import json
import shutil
import time
from pathlib import Path

import pytest

from desk.rounds import changes
from grading.hand_sample import enter_points, load_draw
from grading.reviews import read_overrides
from tests.support.browser import PATIENCE_S, Browser
from tests.support.desk_page import GRADED_S, UPLOADS, DeskPage, choose_first, quick_model, type_key, wait_until_holds
from tests.support.homework import EXAMPLE, assert_each_once, journal
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

FILES = ("rubric.yaml", "solution.ipynb", "template.ipynb")
CRITERIA = ("n_doubled", "n_incomplete", "share_churned", "mean_amount", "max_month")
EARS = "!!window.kvasir && !!document.querySelector('.st-key-points-at-hand button')"


@pytest.mark.gate
def test_an_evening_with_the_demos_class(tmp_path: Path) -> None:
    work = Path(shutil.make_archive(str(tmp_path / "submissions"), "zip", EXAMPLE / "submissions"))
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk, Browser(tmp_path / "browser") as browser:
        folder = desk.home / "riverside"

        # Upload, dry run, trial, grade
        browser.open(desk.url)
        browser.wait_for("New assignment")
        browser.fill("Name", "Riverside")
        for label, path in zip(UPLOADS, [work, *(EXAMPLE / name for name in FILES)], strict=True):
            browser.upload(label, path)
            browser.wait_for(path.name[-6:])
        browser.click("Grade each criterion separately")
        browser.click("Create")
        browser.wait_for("Look before you grade")
        browser.click("Dry run")
        browser.wait_for("counted with the model's tokenizer", GRADED_S)
        assert not (folder / "results.jsonl").exists(), "a dry run calls no model"
        browser.click("Trial")
        browser.wait_for("All 5 submissions of this run", GRADED_S)
        tried = journal(folder)
        browser.click("Grade all")
        browser.wait_for("All 16 submissions of this run", GRADED_S)
        assert journal(folder)[: len(tried)] == tried
        assert_each_once(folder)

        # Grades by hand: the first with keys, the others as a second person enters them
        browser.click("Bound")
        browser.wait_for("can be drawn")
        choose_first(browser, "15")
        browser.click("Draw")
        wait_until(lambda: browser.evaluate(EARS), "the page hears keys", PATIENCE_S)
        for criterion in CRITERIA:
            type_key(browser, "2")
            wait_until_holds(browser, f"Points for {criterion}", "2")
        browser.wait_for("1 of ")
        for item_id in [*load_draw(folder).sampled_members()][1:]:
            for criterion in CRITERIA:
                enter_points(folder, item_id, criterion, "2", "")
        browser.reload()
        browser.click("Show what they say")
        browser.wait_for("Agreement:")
        browser.wait_for("No error in 30 still allows 7.4%, in 15 14.3%.")

        # Review by keys alone
        browser.click("Review")
        browser.wait_for("Final points")
        before = browser.evaluate("location.search")
        time.sleep(0.5)  # in which the grade is read
        type_key(browser, "a")
        wait_until(lambda: len(read_overrides(folder)) == 1, "a decision is kept", PATIENCE_S)
        wait_until(lambda: browser.evaluate("location.search") != before, "the next is shown", PATIENCE_S)

        # One criterion gets a ruling: what that costs, and nobody else's points
        browser.click("Regrade")
        browser.fill("Rulings on edge cases, one a line", "A count of duplicate rows earns nothing.")
        browser.click("Save as a new version")
        browser.wait_for("Asked about anew: n_doubled.")
        browser.click("Regrade beside the present grades")
        browser.wait_for("are different", GRADED_S)
        browser.click("Use this rubric for the class")
        wait_until(lambda: len(changes(folder)) == 1, "the change is written down", PATIENCE_S)
        assert [*changes(folder)[0].criteria] == ["n_doubled"]
        asked = {key.partition(":")[0] for job in planned(folder / "rounds/1") for key in job.get("asked", ())}
        assert asked >= {"n_doubled"}
        browser.wait_for("Changed once", GRADED_S)

        # Export
        browser.click("Export")
        browser.click("Include grades that still need review")
        browser.click("Make the file")
        browser.click("Download final-grades.csv")
        rows = list(csv.DictReader(io.StringIO(browser.wait_for_download("final-grades.csv").read_text("utf-8"))))
        assert len(rows) == 16
        assert [row["reviewed"] for row in rows].count("yes") == 1
        assert [row["points"] for row in rows if row["state"] == "failed"] == [""]
        browser.wait_for("larkspurlena_48112_910012_final.ipynb: failed")
        browser.click("Agreement")
        browser.wait_for("model: the total")
        assert "Traceback" not in desk.text()


def planned(folder: Path) -> list[dict[str, list[str]]]:
    """The jobs in a batch's folder."""
    jobs: list[dict[str, list[str]]] = json.loads((folder / "batch.json").read_text("utf-8"))["jobs"]
    return jobs

"""What the desk says while a grading or a round has only begun."""

import re
from pathlib import Path

import pytest

from tests.support.browser import PATIENCE_S, Browser
from tests.support.desk_page import DeskPage, new_assignment
from tests.support.homework import RUBRIC, tiny, tiny_class
from tests.support.processes import ModelEntry, config_text, environment, run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

SLOW = ModelEntry("simulated", "sim:scale=1,decode=0.1", 32768)  # ten seconds a token
STRICTER = RUBRIC.replace("points: 3", "points: 4").replace("One point for each", "Two points for each")


def config(folder: Path, weights: str) -> Path:
    path = folder / f"{len(weights)}.toml"
    path.write_text(config_text({"m": ModelEntry("simulated", weights, 32768)}), "utf-8")
    return path


def test_what_has_only_begun_is_neither_known_nor_different(tmp_path: Path) -> None:
    work = tiny_class(tmp_path / "class", 1)
    quick, slow = config(tmp_path, "sim:scale=0"), config(tmp_path, SLOW.weights)
    with DeskPage(tmp_path, slow) as desk, Browser(tmp_path / "browser") as browser:
        waiting = new_assignment(desk, "Waiting", work / "submissions", RUBRIC)
        browser.open(desk.at(waiting, "Grade"))
        browser.click("Grade all")
        browser.wait_for("This page may be closed")
        assert "unknown left" not in browser.text()
        assert "not known yet" in browser.text()

        graded = new_assignment(desk, "Graded", work / "submissions", RUBRIC)
        kept = next((graded / "rubrics").iterdir())
        words = [word if word != str(work / "rubric.yaml") else str(kept) for word in tiny(work, graded)]
        done = run("--config", str(quick), "grade", *words, "--quiet", env=environment(tmp_path), cwd=tmp_path)
        assert done.code == 0, done.stderr
        browser.open(desk.at(graded, "Regrade"))
        browser.click("YAML")  # the form comes first
        browser.fill("Rubric", STRICTER)
        browser.click("Save as a new version")
        saved = "[...document.querySelectorAll('input')].some((each) => each.value.startsWith('version 2'))"
        wait_until(lambda: browser.evaluate(saved), "the new version is chosen", PATIENCE_S)
        browser.click("Regrade beside the present grades")
        browser.wait_for("0 of 2 jobs")
        assert "different" not in browser.text()
        assert re.search("Round 1 with the rubric's version 2, ", browser.text())
        assert not re.search(r"\b[0-9a-f]{8}\b", browser.text())
        assert "Traceback" not in desk.text() + browser.text()

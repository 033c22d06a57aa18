"""A course whose instructor sits at the desk, in a browser: upload, dry run, trial, another rubric, the whole class.

In the morning two of them review.
"""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from desk.assignments import grading_work, read_inputs, rubric_versions, version_name
from desk.work import Work
from grading.reviews import Override, read_overrides
from tests.night.courses import CORRECTED_GUIDANCE, GUIDANCE, Course
from tests.night.site import Site
from tests.support.browser import Browser
from tests.support.desk_page import GRADED_S, UPLOADS, DeskPage, type_key, wait_until_chosen
from tests.support.waiting import wait_until

REVIEWERS = ("Ada", "Bo")
_IS_DRAWN = "!window.kvasirReview.state().isBlank"
_IS_KEPT = "window.kvasirReview.acts.length === 0"
_GLANCE_S = 0.5  # in which a grade is read: the screen asks for a second key if the first comes sooner


class Desk:
    """`kvasir ui` over the night's cluster, with a producer's rights."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site = site
        self._folder = folder
        self.home = folder / "home"
        self._stack = ExitStack()
        self._page = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._page.__exit__()
        self._stack.close()

    def prepare(self, course: Course) -> None:
        """Upload, dry run, a trial with a few submissions, and one more with a rubric that is corrected."""
        with Browser(self._folder / "browser") as browser:
            browser.open(self._page.url)
            browser.wait_for("New assignment")
            browser.fill("Name", course.out.name)
            for label, path in zip(UPLOADS, (course.work, course.rubric), strict=False):
                browser.upload(label, path)
                browser.wait_for(path.name[-6:])
            browser.click("Grade each criterion separately")
            browser.click("Create")
            browser.wait_for("Look before you grade")
            browser.upload("Who is in the class", *course.rosters)
            browser.wait_for("people are known")
            browser.click("Dry run")
            browser.wait_for("tokens are", GRADED_S)
            browser.click("Trial")
            browser.wait_for("submissions of this run have", GRADED_S)
            self._correct_rubric(browser, course)

    def _correct_rubric(self, browser: Browser, course: Course) -> None:
        browser.click("Regrade")
        browser.click("YAML")
        text = course.rubric.read_text("utf-8")
        browser.fill("Rubric", text.replace(GUIDANCE, CORRECTED_GUIDANCE))
        browser.click("Save as a new version")
        wait_until(lambda: len(rubric_versions(course.out)) == 2, "another version is kept")
        (corrected,) = set(rubric_versions(course.out)) - {Path(read_inputs(course.out).rubric)}
        wait_until_chosen(browser, version_name(course.out, corrected))
        tried = self._submissions(course)
        browser.click("Regrade beside the present grades")
        browser.wait_for("are different, by", GRADED_S)
        browser.click("Use this rubric for the class")
        work = grading_work(course.out)
        wait_until(lambda: str(corrected) in self._command(work), "the trial has the corrected rubric", GRADED_S)
        wait_until(lambda: not work.is_alive, "the trial has its grades", GRADED_S)
        assert self._submissions(course) == tried, "after a trial only its submissions are graded again"
        course.rubric = corrected

    def submit(self, course: Course) -> "DeskOwner":
        """The whole class."""
        tried = self._submissions(course)
        with Browser(self._folder / "browser") as browser:
            browser.open(self._page.at(course.out, "Grade"))
            browser.click("Grade all")
            wait_until(lambda: self._submissions(course) > tried, "the rest of the class is planned", GRADED_S)
        return DeskOwner(course.out)

    def retry(self, course: Course, state: str) -> None:
        """What has this state, in whatever way the batch was submitted."""
        with Browser(self._folder / "browser") as browser:
            browser.open(self._page.at(course.out, "Grade"))
            browser.click(f"Try the {state} ones again")
            wait_until(lambda: grading_work(course.out).exit_code is not None, "another try has ended", GRADED_S)

    @staticmethod
    def _command(work: Work) -> Sequence[str]:
        """What the desk started last."""
        record = work.record()
        return record.command if record else ()

    @staticmethod
    def _submissions(course: Course) -> set[str]:
        """Those that the batch has planned so far."""
        jobs = json.loads((course.out / "batch.json").read_text("utf-8"))["jobs"]
        return {job["item_id"].partition(".")[0] for job in jobs}

    def review(self, course: Course, each: int) -> list[Override]:
        """Two people, each in a browser, accept so many grades each by keyboard; what stands decided then."""
        with ExitStack() as stack:
            browsers = {name: stack.enter_context(Browser(self._folder / name)) for name in REVIEWERS}
            for name, browser in browsers.items():
                browser.open(self._page.at(course.out, "Review") + "&show=all")
                browser.wait_for("Final points")
                browser.fill("Your name", name)
            _, second = browsers.values()
            for _ in range(each):  # past those that the first one will take
                type_key(second, "j")
            for _ in range(each):
                for browser in browsers.values():
                    wait_until(partial(browser.evaluate, _IS_DRAWN), "the grade is there", GRADED_S)
                    time.sleep(_GLANCE_S)
                    type_key(browser, "a")
            for browser in browsers.values():
                wait_until(partial(browser.evaluate, _IS_KEPT), "each decision is kept", GRADED_S)
        return read_overrides(course.out)

    def kill(self) -> None:
        """SIGKILL of the page's process; what it started goes on, and a new one finds it."""
        self._page.kill()
        self._page = self._open()

    def _open(self) -> DeskPage:
        self._site.cluster.role = "producer"
        environ = self._site.cluster.environment
        return DeskPage(self._folder, self._site.cluster.config, self.home, environ)


class DeskOwner:
    """The process that the desk started for a class."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def alive(self) -> bool:
        """Whether it grades."""
        return grading_work(self._folder).is_alive

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, once it has ended by itself."""
        wait_until(lambda: not self.alive, "the desk's grading has ended", timeout_s, poll_s=0.5)
        return grading_work(self._folder).exit_code

    def text(self) -> str:
        """What it printed last."""
        return str(grading_work(self._folder).exit_code)

"""The desk when broker or disk fail under it: that is said, nothing is lost, and nothing is sent twice."""

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grading.reviews import read_overrides
from tests.support.browser import Browser
from tests.support.desk_page import GRADED_S, DeskPage, graded_assignment, new_assignment, quick_model, steps
from tests.support.homework import RUBRIC, assert_each_once, journal, tiny_class
from tests.support.processes import Cluster, ModelEntry
from tests.support.servers import RabbitMQServer, RedisServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

SIZE = 20
QUICK = ModelEntry("simulated", "sim:scale=0", 32768)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser"), 1440, 900) as opened:
        yield opened


def test_a_broker_that_goes_and_comes_back_and_a_batch_that_is_cancelled_and_run_again(
    browser: Browser, tmp_path: Path
) -> None:
    work = tiny_class(tmp_path / "class", SIZE) / "submissions"
    with (
        RabbitMQServer() as broker,
        RedisServer() as store,
        Cluster(tmp_path / "cluster", broker.url, store.url, {"quick": QUICK}) as cluster,
        DeskPage(tmp_path, cluster.config, environ=cluster.environment) as desk,
    ):
        folder = new_assignment(desk, "Means", work, RUBRIC)
        broker.kill()
        browser.open(desk.at(folder, "Grade"))
        browser.click("Grade all")
        browser.wait_for(f"{2 * SIZE} jobs have no result yet. 'Grade all' goes on. no connection to the broker")

        # Back again, and gone once more while everything waits for a worker
        broker.start()
        browser.click("Grade all")
        browser.wait_for(f"{SIZE} being graded, how long it takes is not known yet")
        wait_until(lambda: len(steps(folder, "submitted")[-1]) == 2 * SIZE, "everything is submitted")
        broker.restart()

        # Cancelled on the page, and run again
        browser.click("Cancel")
        browser.wait_for("Try the cancelled ones again")
        assert Counter(row["state"] for row in journal(folder)) == {"cancelled": 2 * SIZE}
        _, decode = [cluster.worker(role, "quick") for role in ("prefill", "decode")]
        browser.click("Try the cancelled ones again")
        wait_until(lambda: len(journal(folder)) == 4 * SIZE, "all are answered", GRADED_S)
        browser.wait_gone("Try the")
        browser.wait_for(f"All {SIZE} submissions of this run")
        wait_until(lambda: decode.registration.done == 2 * SIZE, "each was decoded once")
        assert max(Counter(steps(folder, "submitted")[-1]).values(), default=0) <= 1
        assert "Traceback" not in desk.text()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of its own for this folder; the test is skipped where nobody may mount one."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all that is left of the disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def test_a_full_disk_is_said_and_what_was_decided_before_stays(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with small_disk(home, "2m"), DeskPage(tmp_path, quick_model(tmp_path), home) as desk:
        folder = new_assignment(desk, "Means", tiny_class(tmp_path / "class", 6) / "submissions", RUBRIC)
        graded = graded_assignment(desk, 4)
        filler = fill(home)

        browser.open(desk.at(folder, "Grade"))
        browser.click("Grade all")
        browser.wait_for("No space left on device")
        browser.open(desk.at(graded, "Like answers"))
        browser.click("Answers without a doubt too")
        browser.click("Tick all")
        browser.click("Decide on those that are ticked")
        browser.wait_for("No space left on device")
        assert read_overrides(graded) == []

        filler.unlink()
        browser.click("Decide on those that are ticked")
        browser.wait_for("Decided.")
        assert len(read_overrides(graded)) == 4
        browser.open(desk.at(folder, "Grade"))
        browser.click("Grade all")
        browser.wait_for("All 6 submissions of this run", GRADED_S)
        assert_each_once(folder)
        assert "Traceback" not in desk.text()

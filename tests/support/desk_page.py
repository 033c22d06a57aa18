"""The desk as an instructor runs it: `kvasir ui` in a process of its own, with a folder of assignments."""

import importlib.resources
import json
import os
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import quote

from desk import assignments
from desk.assignments import Inputs, grading_work
from desk.rounds import rounds
from infra.config.settings import load_settings
from kvasir import class_run
from kvasir.class_run import request_from
from tests.support.browser import AT_REST, PATIENCE_S, Browser, BrowserFailed
from tests.support.desk import answer, plan
from tests.support.homework import RUBRIC, tiny_class
from tests.support.processes import ROOT, ModelEntry, command, config_text, environment
from tests.support.waiting import wait_until

START_S = 60.0
ACCOUNT = "testperson"  # the login name under which a desk runs: a person's, so that it asks for no other
UPLOADS = ("Submissions", "Rubric", "Solution", "Template")  # how the file fields of a new assignment begin
GRADED_S = 200.0

# Sideways: what does not fit the screen. Overlaps: pairs of buttons and fields that share more than their border.
ON_A_PHONE = """
(function () {
  const main = document.querySelector("[data-testid=stMain]");
  const wide = [document.documentElement, main].filter((e) => e.scrollWidth > innerWidth).length;
  const found = [...main.querySelectorAll("button, input, textarea")].filter((e) => e.getClientRects().length
    && getComputedStyle(e).opacity !== "0" && !e.closest("details:not([open])"));
  const overlaps = [];
  for (const one of found) for (const other of found) {
    if (one === other || one.contains(other) || other.contains(one)) continue;
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2)
      overlaps.push((one.innerText || one.ariaLabel) + " / " + (other.innerText || other.ariaLabel));
  }
  return [wide, overlaps];
})()
"""

SERIOUS = """
axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => violations
  .filter(({impact}) => impact === "serious" || impact === "critical")
  .map(({id, nodes}) => [id, nodes.map(({html, any}) => [html.slice(0, 200), any.map((one) => one.message)])]))
"""


class DeskPage:
    """A running desk. Use as a context manager: leaving ends it, and what it started."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        home: Path | None = None,
        environ: dict[str, str] | None = None,
        port: int | None = None,
        account: str = ACCOUNT,
    ):
        """`folder` takes the log; `home` the assignments. `port`: that of a desk that is gone."""
        folder.mkdir(parents=True, exist_ok=True)
        self.home = home or folder / "home"
        self.config = config
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"desk-{self.port}.log"
        words = ["--config", str(config), "ui", "--home", str(self.home), "--port", str(self.port)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command(*words),
                env=(environ or environment(folder)) | {"LOGNAME": account},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.kill()
        for folder in self.home.glob("*/"):
            for place in (folder, *rounds(folder)):
                cut_off(place)

    @property
    def pid(self) -> int:
        """Of the process that serves the page."""
        return self._process.pid

    def at(self, folder: Path, section: str) -> str:
        """The address of a section of an assignment."""
        return f"{self.url}/?assignment={quote(str(folder))}&section={section}"

    def kill(self) -> None:
        """SIGKILL for the desk alone: what it started lives. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def text(self) -> str:
        """What it logged."""
        return self.log.read_text("utf-8", "replace")

    def _wait(self) -> None:
        try:
            wait_until(lambda: self._process.poll() is not None or self._answers(), "the desk answers", START_S)
            assert self._process.poll() is None, "the desk ended while starting"
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.text()[-3000:]}") from None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def quick_model(folder: Path) -> Path:
    """Configuration of a model that answers at once."""
    config = folder / "kvasir.toml"
    config.write_text(config_text({"quick": ModelEntry("simulated", "sim:scale=0", 32768)}), "utf-8")
    return config


def new_assignment(desk: DeskPage, title: str, work: Path, rubric: str) -> Path:
    """An assignment of this desk, as its page makes it."""
    folder = assignments.create_folder(desk.home, title)
    rubric_path = assignments.save_rubric(folder, "rubric.yaml", rubric.encode())
    assignments.save_inputs(folder, Inputs(title, str(work), str(rubric_path)))
    return folder


def graded_assignment(desk: DeskPage, size: int, doubtful: Sequence[int] = (), rubric_text: str = RUBRIC) -> Path:
    """A class of `tiny_class`, two points for each criterion, and no process for it; `doubtful` ones need review."""
    work = tiny_class(Path(tempfile.mkdtemp(dir=desk.home.parent)) / "class", size)
    folder = new_assignment(desk, "Means", work / "submissions", rubric_text)
    rubric = Path(assignments.read_inputs(folder).rubric)
    assignment = plan(folder, request_from(load_settings(config=desk.config), work / "submissions", rubric))
    answer(folder, assignment, [number for number in range(size) if number not in doubtful])
    answer(folder, assignment, doubtful, evidence="nowhere to be found")
    class_run.look(load_settings(config=desk.config), folder)  # its grades are written down, as by a grading
    return folder


def grade_all(browser: Browser, desk: DeskPage, folder: Path, size: int) -> None:
    """Press the button, and wait until all are done."""
    browser.open(desk.at(folder, "Grade"))
    browser.click("Grade all")
    browser.wait_for(f"All {size} submissions of this run", GRADED_S)


def wait_until_chosen(browser: Browser, value: str) -> None:
    """Return when a select box of the page holds this."""
    script = f"[...document.querySelectorAll('input')].some((each) => each.value === {json.dumps(value)})"
    wait_until(lambda: browser.evaluate(script), f"{value!r} is chosen")


def choose_first(browser: Browser, option: str) -> None:
    """Choose this in the page's first select box, as often as it takes: an open menu closes when the page moves."""
    field = "[data-testid=stMain] [data-testid=stSelectbox] input"
    wait_until(lambda: browser.evaluate(AT_REST), "the page has come to rest", PATIENCE_S)

    def try_to_choose() -> bool:
        browser.press("css", field)
        try:
            browser.click(option, timeout_s=5)
        except BrowserFailed:
            return False
        return True

    wait_until(try_to_choose, f"{option} can be chosen", 2 * PATIENCE_S)


def value(browser: Browser, label: str) -> str | None:
    """What the field with this label holds; None if there is none."""
    field_value = browser.evaluate(
        f"(document.querySelector('[aria-label={json.dumps(label)}]') || {{}}).value ?? null"
    )
    return None if field_value is None else str(field_value)


def wait_until_holds(browser: Browser, label: str, text: str) -> None:
    wait_until(
        lambda: value(browser, label) == text, f"{label} holds {text!r}, not {value(browser, label)!r}", PATIENCE_S
    )


def type_key(browser: Browser, key: str) -> None:
    """Press a key that is not typed into a field, once the page has come to rest."""
    wait_until(lambda: browser.evaluate(AT_REST), "the page has come to rest", PATIENCE_S)
    code = f"Key{key.upper()}" if key.isalpha() else f"Digit{key}" if key.isdigit() else "Slash"
    for event in ("keyDown", "keyUp"):
        text = {"text": key} if event == "keyDown" else {}
        browser.call(
            "Input.dispatchKeyEvent", type=event, key=key, code=code, windowsVirtualKeyCode=ord(key.upper()), **text
        )


def axe_finds(browser: Browser) -> list[object]:
    """The serious problems of the page as it is, once it has come to rest."""
    axe = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text("utf-8")
    wait_until(lambda: browser.evaluate(AT_REST), "the page has come to rest", PATIENCE_S)
    browser.evaluate(f"{axe};0")
    return list(browser.evaluate(SERIOUS))


def cut_off(folder: Path) -> None:
    """End the grading in this folder as a power cut does. Nothing happens if none runs."""
    work = grading_work(folder)
    record = work.record()
    if record and work.is_alive:
        os.killpg(record.pid, signal.SIGKILL)
        wait_until(lambda: not work.is_alive, "the grading is dead")


def steps(folder: Path, event: str) -> list[list[str]]:
    """The jobs that took this step, for each process that graded here, in order."""
    runs: list[list[str]] = []
    log = grading_work(folder).log
    for line in log.read_text("utf-8", "replace").splitlines() if log.exists() else ():
        row = json.loads(line) if line.startswith("{") else {}
        if row.get("event") == "work_started":
            runs.append([])
        elif row.get("event") == event:
            runs[-1].append(row["job"])
    return runs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

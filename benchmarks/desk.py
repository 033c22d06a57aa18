"""The grading desk with a big class: how long an interaction takes in the browser, and what the desk's memory does.

A batch of made-up submissions is graded by simulated engines while headless Chromium clicks through the results and
reviews. An interaction's time is the browser's own: from the click until what was asked for stands on the page, all of
it: the desk has nothing more to draw.
Memory is the desk process's, which the grading is no part of.

    python -m benchmarks.desk [--quick]

Last line: one JSON object. `p95_ms`, `p99_ms`; `growth_mb`: memory from the 50th to the 200th result's submission.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import harness
from desk import assignments
from desk.assignments import Inputs
from tests.support.browser import Browser
from tests.support.desk_page import DeskPage
from tests.support.homework import journal
from tests.support.processes import ModelEntry, command, config_text, environment
from tests.support.waiting import wait_until

FULL, QUICK = 200, 20
PATIENCE_S = 900.0
CELLS = 12  # code cells of a submission, as long as the median of what real classes hand in
RUBRIC = """\
title: A big class
criteria:
  - {id: cleaning, title: Reads and cleans the data, points: 5, model: code, guidance: One point for each step.}
  - {id: analysis, title: Groups and sums, points: 5, model: code, guidance: Any way that works.}
  - {id: text, title: Explains what was found, points: 5, model: feedback, guidance: Names figures.}
"""

# Runs in the page: presses, and resolves with the milliseconds until `done` holds.
_TIMED = """
(async function () {
  const started = performance.now();
  const element = %s;
  if (!element) throw new Error("nothing to press");
  element.click();
  while (!(%s)) {
    if (performance.now() - started > 30000) throw new Error("waited 30 s");
    await new Promise((resolve) => setTimeout(resolve, 4));
  }
  return performance.now() - started;
})()
"""
_BUTTON = (  # beside its name stands its key
    "[...document.querySelectorAll('button')].find((each) =>"
    " (each.querySelector('p') || each).innerText.trim() === %s && !each.disabled)"
)
# The page is drawn part by part, and parts of the last one stay until then.
_WHOLE = "!!document.querySelector('[data-test-script-state=notRunning]')"
_SECTION = "[...document.querySelectorAll('label')].find((each) => each.innerText.trim() === %s)"


def main() -> None:
    """Make the class, grade it, click, and print the figures."""
    options = harness.options(__doc__)
    size = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), size, clicks=12 if options.quick else 150)
    harness.finish(benchmark="desk", submissions=size, machine=harness.machine(), **figures)


def measure(folder: Path, size: int, clicks: int) -> dict[str, Any]:
    """All figures of one class."""
    home = make_class(folder, size)
    config = folder / "kvasir.toml"
    # Two submissions a second, many times the pace of real models: each is read for attacks once, in a sixteenth.
    weights = "sim:prefill=40000,decode=200,scale=1"
    config.write_text(config_text({"simulated": ModelEntry("simulated", weights, 32768, slots=2)}), "utf-8")
    with DeskPage(folder / "desk", config, home, environment(folder)) as desk, Browser(folder / "browser") as browser:
        assignment = home / "big"
        start(assignment, config)
        wait_until(lambda: len(journal(assignment)) > 2, "the grading is under way", PATIENCE_S)
        browser.open(f"{desk.at(assignment, 'Review')}&show=all")
        ready = f"{_WHOLE} && {_FORM} && !!({_BUTTON % json.dumps('Next')})"
        wait_until(lambda: browser.evaluate(ready), "the first submission can be reviewed", PATIENCE_S)
        times, memory = click_through(browser, desk, assignment, size, clicks)
    return figures(times, memory, size)


def make_class(folder: Path, size: int) -> Path:
    """The desk's home with one assignment of `size` notebooks."""
    assignment = folder / "home" / "big"
    work = folder / "work"
    work.mkdir(parents=True)
    for number in range(size):
        (work / f"student{number:03}_{1000 + number}_{number}_homework.ipynb").write_text(notebook(number), "utf-8")
    assignment.mkdir(parents=True)
    rubric = assignments.save_rubric(assignment, "rubric.yaml", RUBRIC.encode())
    assignments.save_inputs(assignment, Inputs("A big class", str(work), str(rubric)))
    return folder / "home"


def notebook(number: int) -> str:
    """A made-up notebook of about 20,000 characters."""
    cells: list[dict[str, Any]] = []
    for cell in range(CELLS):
        code = "\n".join(f"total_{cell}_{line} <- sum(orders$amount[{number} + {line}])" for line in range(18))
        output = {"output_type": "stream", "name": "stdout", "text": f"[1] {number}.{cell}\n" * 40}
        cells.append({"cell_type": "markdown", "metadata": {}, "source": f"Step {cell}: what student {number} found."})
        cells.append({"cell_type": "code", "metadata": {}, "execution_count": 1, "source": code, "outputs": [output]})
    kernel = {"kernelspec": {"name": "ir", "language": "R", "display_name": "R"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": cells})


def start(assignment: Path, config: Path) -> None:
    """As the button does."""

    class Commands:
        def command(self, *arguments: str) -> list[str]:
            return command("--config", str(config), *arguments)

    inputs = assignments.read_inputs(assignment)
    assignments.grading_work(assignment).start(assignments.grade_command(Commands(), inputs, assignment))  # type: ignore[arg-type]


def click_through(
    browser: Browser, desk: DeskPage, assignment: Path, size: int, clicks: int
) -> tuple[list[float], dict[int, int]]:
    """(milliseconds of each interaction, the desk's bytes when so many submissions were done)."""
    times: list[float] = []
    memory: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    turn = 0
    while (turn < clicks or len(journal(assignment)) < 2 * size) and time.monotonic() < deadline:
        times.append(interact(browser, turn))
        done = len(journal(assignment)) // 2
        memory[done] = resident(desk.pid)
        turn += 1
    return times, memory


def interact(browser: Browser, turn: int) -> float:
    """One click and its milliseconds: the next submission, and every tenth time a look at the table and back."""
    if turn % 10 == 8:
        return timed(
            browser, _SECTION % '"Results"', f"{_WHOLE} && !!document.querySelector('[data-testid=stDataFrame]')"
        )
    if turn % 10 == 9:
        return timed(browser, _SECTION % '"Review"', f"{_WHOLE} && {_FORM}")
    last = browser.evaluate(f"!({_BUTTON % json.dumps('Next')})")
    # Not the next number: whose answers come later is not there yet.
    done = f"{_WHOLE} && {_CHOSEN} !== {browser.evaluate(_CHOSEN)} && {_SHOWN} && {_FORM}"
    return timed(browser, _BUTTON % json.dumps("Previous" if last else "Next"), done)


# The number of the submission that the page is about, as its own select box says it; -1: as yet of none.
_CHOSEN = (
    "Number(([...document.querySelectorAll('[data-testid=stSelectbox]')]"
    ".map((each) => each.innerText + ((each.querySelector('input') || {}).value || ''))"
    ".map((each) => each.match(/^Submission\\s*student(\\d+)_/)).find(Boolean) || [0, -1])[1])"
)
_FORM = "!!document.querySelector('input[aria-label=\"Points for cleaning\"]')"
# Whether its work is the one that can be read.
_SHOWN = (
    "((number) => [...document.querySelectorAll('pre')]"
    f".some((each) => each.textContent.includes(' ' + number + ' found.')))({_CHOSEN})"
)


def timed(browser: Browser, element: str, done: str) -> float:
    """Milliseconds from pressing `element` until `done` holds."""
    return float(browser.evaluate(_TIMED % (element, done)))


def resident(pid: int) -> int:
    """Bytes of memory that a process holds (Linux); 0 elsewhere."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def figures(times: list[float], memory: dict[int, int], size: int) -> dict[str, Any]:
    """What is reported of the measurements."""
    cuts = quantiles(times, n=100, method="inclusive")
    early = next((held for done, held in sorted(memory.items()) if done >= size // 4), 0)
    late = memory[max(memory)]
    return {
        "interactions": len(times),
        "median_ms": median(times),
        "p95_ms": cuts[94],
        "p99_ms": cuts[98],
        "growth_mb": (late - early) / 2**20,
        "memory_mb": late / 2**20,
    }


if __name__ == "__main__":
    main()

"""The grading desk with a big class: what a correction costs, how long everything takes, what the desk's memory does.

While it is graded: a batch of made-up submissions is graded by simulated engines while headless Chromium goes through
the results and reviews. An interaction's time is the browser's own: from the click until what was asked for stands on
the page, all of it: the desk has nothing more to draw. Memory is the desk process's, which the grading is no part of.

Reviewed: in a class that is graded, of four criteria each, somebody corrects 30 grades by keyboard alone. Which
criterion is wrong, and what it should have got, is drawn: the doubtful one in four of five, another one else; a third
take another reason than the first of the list. Nobody types a sentence. A key is counted where a key is pressed. What
was decided is compared with what was drawn. Then come keys at random, after each of which the criterion that is open
must be in sight. Nobody thinks here: a person takes seconds where this takes a quarter of one between two submissions.

    python -m benchmarks.desk [--quick] [--seed N]

Last line: one JSON object. `p95_ms`, `p99_ms`; `growth_mb`: memory from the 50th to the 200th result's submission.
`keys_per_correction`: the median, `keys_p90`: nine of ten need no more; `paint_ms_p95`: from a key to the picture that
follows it; `next_ms_p95`: from a key until the next submission can be read; `out_of_view`: how often the open criterion
was not in sight. `rows` has the same for each size of class.
"""

import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import harness
from desk import assignments
from desk.assignments import Inputs
from grading.jobs import Assignment
from grading.reviews import Override, append_override, read_overrides
from infra.config.settings import load_settings
from kvasir.class_run import request_from
from messages.jobs import DecodeReport, JobResult, PrefillReport
from producers.batch.batch import Batch
from tests.support.browser import Browser
from tests.support.desk import plan
from tests.support.desk_page import DeskPage, quick_model
from tests.support.homework import journal
from tests.support.processes import ModelEntry, command, config_text, environment
from tests.support.waiting import wait_until

FULL, QUICK, LARGE = 200, 20, 1_000
PATIENCE_S = 900.0
CELLS = 12  # code cells of a submission, as long as the median of what real classes hand in
RUBRIC = """\
title: A big class
criteria:
  - {id: cleaning, title: Reads and cleans the data, points: 5, model: code, guidance: One point for each step.}
  - {id: analysis, title: Groups and sums, points: 5, model: code, guidance: Any way that works.}
  - {id: text, title: Explains what was found, points: 5, model: feedback, guidance: Names figures.}
"""

WINDOW = 1440, 900
THINKING_S = 0.25
MODEL_POINTS = 2
COLLEAGUE = "Ivo"  # has corrected some other submissions before
MOST_POINTS = {"cleaning": 3, "analysis": 10, "plot": 4, "text": 5}
_GUIDANCE = "One point for each step that is there; half of one where it is there and does not run."
RUBRIC_OF_FOUR = "title: A big class\ncriteria:\n" + "".join(
    f"  - {{id: {id}, title: What {id} asks for, points: {most}, step: 0.5, model: {model}, guidance: {_GUIDANCE}}}\n"
    for (id, most), model in zip(MOST_POINTS.items(), ("code", "code", "code", "feedback"), strict=True)
)

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
# The page is drawn part by part, and parts of the last one stay until then.
_WHOLE = "!!document.querySelector('[data-test-script-state=notRunning]')"
_SECTION = "[...document.querySelectorAll('label')].find((each) => each.innerText.trim() === %s)"


def main() -> None:
    """Make the class, grade it, click, and print the figures."""
    options = harness.options(__doc__)
    size = QUICK if options.quick else FULL
    sizes = (QUICK,) if options.quick else (FULL, LARGE)
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), size, clicks=12 if options.quick else 150)
        rows = [review(Path(name) / f"reviewed{count}", count, options) for count in sizes]
    figures |= {name: value for name, value in rows[0].items() if name != "submissions"}
    harness.finish(benchmark="desk", submissions=size, machine=harness.machine(), **figures, rows=rows)


def measure(folder: Path, size: int, clicks: int) -> dict[str, Any]:
    """All figures of one class while it is graded."""
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
        wait_until(lambda: browser.evaluate(_REVIEWABLE), "the first submission can be reviewed", PATIENCE_S)
        times, memory = click_through(browser, desk, assignment, size, clicks)
    return figures(times, memory, size)


def make_class(folder: Path, size: int, rubric_text: str = RUBRIC) -> Path:
    """The desk's home with one assignment of `size` notebooks."""
    assignment = folder / "home" / "big"
    work = folder / "work"
    work.mkdir(parents=True)
    for number in range(size):
        (work / f"student{number:03}_{1000 + number}_{number}_homework.ipynb").write_text(notebook(number), "utf-8")
    assignment.mkdir(parents=True)
    rubric = assignments.save_rubric(assignment, "rubric.yaml", rubric_text.encode())
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
        return timed(browser, _SECTION % '"Results"', f"{_WHOLE} && !!document.querySelector('.kv-class tbody tr')")
    if turn % 10 == 9:
        return timed(browser, _SECTION % '"Review"', f"{_WHOLE} && {_REVIEWABLE}")
    button = next(
        name for name in ("next", "previous") if browser.evaluate(f"!document.querySelector('.kv-{name}').disabled")
    )
    shown = browser.evaluate("window.kvasirReview.shown")
    done = f"{_WHOLE} && {_REVIEWABLE} && window.kvasirReview.shown !== {json.dumps(shown)}"
    return timed(browser, f"document.querySelector('.kv-{button}')", done)


# The work and the grade of the submission that the screen is about can be read.
_REVIEWABLE = (
    "(!!window.kvasirReview?.root?.isConnected"
    " && window.kvasirReview.workKey.startsWith(window.kvasirReview.shown + ' ')"
    " && !!document.querySelector('.kv-grade .kv-points'))"
)


def timed(browser: Browser, element: str, done: str) -> float:
    """Milliseconds from pressing `element` until `done` holds."""
    return float(browser.evaluate(_TIMED % (element, done)))


# --- reviewed


def review(folder: Path, size: int, options: harness.BenchmarkOptions) -> dict[str, Any]:
    """The figures of reviewing one class that is graded."""
    rng = random.Random(options.seed)
    folder.mkdir()
    home, config = make_class(folder, size, RUBRIC_OF_FOUR), quick_model(folder)
    inputs = assignments.read_inputs(home / "big")
    request = request_from(load_settings(config=config), Path(inputs.submissions), Path(inputs.rubric))
    assignment = plan(home / "big", request)
    corrections = draw_corrections(rng, [item.item_id for item in assignment.items], options.quick)
    give_answers(home / "big", assignment, {correction.item_id: correction.doubtful for correction in corrections})
    give_reasons(home / "big", assignment, {correction.item_id for correction in corrections})
    with (
        DeskPage(folder / "desk", config, home, environment(folder)) as desk,
        Browser(folder / "browser", *WINDOW) as browser,
    ):
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=_CLOCK)
        browser.open(desk.at(home / "big", "Review"))
        wait_until(lambda: browser.evaluate(_REVIEWABLE), "the first submission can be reviewed", PATIENCE_S)
        keys = correct_all(browser, {correction.item_id: correction for correction in corrections})
        wait_until(lambda: browser.evaluate("window.kvasirReview.acts.length") == 0, "all is kept", PATIENCE_S)
        check_decisions(home / "big", corrections)
        browser.evaluate("window.kvasirReview.choose({}, 'all');0")
        pass_through(browser, 10 if options.quick else 60)
        next_times = browser.evaluate("window.nextTimes")
        out_of_view = press_at_random(browser, rng, 100 if options.quick else 1_000)
        paint_times = browser.evaluate("window.paintTimes")
    return {
        "submissions": size,
        "corrections": len(keys),
        "keys_per_correction": median(keys),
        "keys_p90": quantiles(keys, n=10, method="inclusive")[8],
        "paint_ms_p95": quantiles(paint_times, n=20, method="inclusive")[18],
        "next_ms_p95": quantiles(next_times, n=20, method="inclusive")[18],
        "out_of_view": out_of_view,
    }


@dataclass(frozen=True, slots=True)
class Correction:
    """What a person finds wrong with one grade."""

    item_id: str
    doubtful: str  # the criterion that the desk asks about
    criterion: str
    points: int
    takes_second_reason: bool


def draw_corrections(rng: random.Random, item_ids: Sequence[str], quick: bool) -> list[Correction]:
    """One for each of some submissions: their doubtful criterion is wrong in four of five."""
    count = 6 if quick else 30
    elsewhere, second_reasons = set(rng.sample(range(count), count // 5)), set(rng.sample(range(count), count // 3))
    corrections = []
    for number, item_id in enumerate(rng.sample(list(item_ids), count)):
        doubtful = rng.choice(list(MOST_POINTS))
        others = [criterion for criterion in MOST_POINTS if criterion != doubtful]
        criterion = rng.choice(others) if number in elsewhere else doubtful
        points = rng.choice([points for points in range(MOST_POINTS[criterion] + 1) if points != MODEL_POINTS])
        corrections.append(Correction(item_id, doubtful, criterion, points, number in second_reasons))
    return corrections


def give_answers(folder: Path, assignment: Assignment, doubtful: Mapping[str, str]) -> None:
    """A model's answers for all; of each submission in `doubtful`, the quote for this criterion is made up."""
    with Batch(folder) as batch:
        results = []
        for item in assignment.items:
            for task in item.tasks:
                answer: dict[str, Any] = {
                    criterion.id: {
                        "evidence": "nowhere" * 3
                        if doubtful.get(item.item_id) == criterion.id
                        else "sum(orders$amount",
                        "points": MODEL_POINTS,
                        "feedback": f"Half of what {criterion.id} asks for is there.",
                    }
                    for criterion in assignment.rubric.for_model(task.aspect)
                }
                answer |= {"summary": "A good beginning."} if task.aspect == "feedback" else {}
                job, report = task.job, DecodeReport(kv_transfer="verified", completion_tokens=100, decode_s=4.0)
                results.append(
                    JobResult(
                        *(
                            job.job_id,
                            1,
                            batch.batch_id,
                            job.item_id,
                            job.model,
                            "succeeded",
                            json.dumps(answer),
                            "stop",
                        ),
                        prefill=PrefillReport(prefill_s=2.0, computed_tokens=1000),
                        decode=report,
                    )
                )
        batch.journal.record(results)


def give_reasons(folder: Path, assignment: Assignment, corrected: Set[str]) -> None:
    """Somebody else's corrections of other submissions, so that the lists have a reason beside the first."""
    others = iter(item.item_id for item in assignment.items if item.item_id not in corrected)
    for criterion in MOST_POINTS:
        for points in (MODEL_POINTS - 1, MODEL_POINTS + 1):
            append_override(
                folder, Override(next(others), criterion, points, None, "half of a step is there", COLLEAGUE)
            )


def correct_all(browser: Browser, corrections: Mapping[str, Correction]) -> list[int]:
    """The keys that each correction took, in the order of the queue."""
    counts = []
    for _ in corrections:
        wait_until(lambda: browser.evaluate(_REVIEWABLE), "the submission can be reviewed", PATIENCE_S)
        correction = corrections[browser.evaluate("window.kvasirReview.shown")]
        ids = list(MOST_POINTS)
        way = ids.index(correction.criterion) - ids.index(browser.evaluate("window.kvasirReview.active"))
        keys = ["ArrowDown" if way > 0 else "ArrowUp"] * abs(way) + list(str(correction.points))
        keys += ["r", "2"] if correction.takes_second_reason else []
        for key in [*keys, "Enter"]:
            press(browser, key)
        counts.append(len(keys) + 1)
        time.sleep(THINKING_S)
    return counts


def check_decisions(folder: Path, corrections: Sequence[Correction]) -> None:
    """Raises SystemExit if anything else was decided than what was drawn."""
    decided = {
        (each.item_id, each.criterion_id, each.points) for each in read_overrides(folder) if each.reviewer != COLLEAGUE
    }
    drawn = {(each.item_id, each.criterion, each.points) for each in corrections}
    if decided != drawn:
        raise SystemExit(f"decided was not what was drawn: {sorted(map(str, decided ^ drawn))}")


def pass_through(browser: Browser, count: int) -> None:
    """So many submissions, each once the one before can be read."""
    for _ in range(count):
        before = browser.evaluate("window.nextTimes.length")
        press(browser, "j" if browser.evaluate("window.kvasirReview.ahead(1).length") else "k")
        wait_until(lambda before=before: browser.evaluate("window.nextTimes.length") > before, "the next one is shown")
        time.sleep(THINKING_S)


def press_at_random(browser: Browser, rng: random.Random, count: int) -> int:
    """After how many of so many keys the open criterion was not in sight."""
    keys = [*"0123456789.agjkz", *["ArrowDown", "ArrowUp"] * 6, "Enter", "Enter"]
    out_of_view = 0
    for _ in range(count):
        press(browser, rng.choice(keys))
        out_of_view += not browser.evaluate(_IN_VIEW)
    return out_of_view


def press(browser: Browser, key: str) -> None:
    """A real key, down and up."""
    codes = {"ArrowDown": 40, "ArrowUp": 38, "Enter": 13}
    for event in ("rawKeyDown", "keyUp"):
        code = codes.get(key) or ord(key.upper())
        browser.call("Input.dispatchKeyEvent", type=event, key=key, windowsVirtualKeyCode=code)


# Notes of each key how long the picture takes that follows it, and the next submission where the key leads there. It is
# in the page before the screen is, which passes no key on.
_CLOCK = """
window.paintTimes = [];
window.nextTimes = [];
(function () {
  const painted = (then) => requestAnimationFrame(() => {
    const {port1, port2} = new MessageChannel();
    port1.onmessage = then;
    port2.postMessage(0);
  });
  addEventListener("keydown", (event) => {
    const screen = window.kvasirReview;
    if (!screen) return;
    const before = screen.shown;
    const since = () => performance.now() - event.timeStamp;
    const look = () => {
      const isThere = screen.workKey.startsWith(screen.shown + " ") && screen.grade.querySelector(".kv-points");
      if (isThere) window.nextTimes.push(since());
      else painted(look);
    };
    painted(() => {
      window.paintTimes.push(since());
      if (screen.shown !== before) look();
    });
  }, true);
})();
"""

# The open row is within its panel and the window; where it is taller than these, its head and its points are.
_IN_VIEW = """
(function () {
  const row = document.querySelector(".kv-grade .kv-active");
  if (!row) return false;
  const panel = document.querySelector(".kv-grade").getBoundingClientRect();
  const inside = (r) => r.top >= panel.top - 1 && r.bottom <= panel.bottom + 1 && r.top >= 0 && r.bottom <= innerHeight;
  const all = row.getBoundingClientRect();
  if (all.height <= panel.height) return inside(all);
  const parts = [row.querySelector("button"), row.querySelector(".kv-give")];
  return parts.every((each) => !each || inside(each.getBoundingClientRect()));
})()
"""


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

"""From inputs to grades: dry run, trial, the whole class, and how it goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import streamlit as st

from desk import assignments, dry_runs
from desk.assignments import Inputs
from desk.estimate import duration, forecast_s, remaining_s
from desk.pages.address import go
from desk.pages.shared import REFRESH_S, Desk, act, live, say_problem, sentences, wait_for
from desk.text import escaped
from desk.work import Work
from producers.words import plural

_SHOWN = 50  # rows of the dry run's table


def show(desk: Desk, folder: Path) -> None:
    """Draw it."""
    inputs = assignments.read_inputs(folder)
    with st.expander("What is graded, by what"):
        for label, value in _facts(inputs):
            st.markdown(f"**{label}**: {escaped(value) or '–'}")
    if not inputs.rubric:
        st.info("What is graded, and with how many points, is not written yet.")
        if st.button("Write the rubric", type="primary"):
            go("Regrade", str(folder))
        return
    _dry_run(desk, folder, inputs)
    _start(desk, folder, inputs)
    _progress(desk, folder)


def _facts(inputs: Inputs) -> list[tuple[str, str]]:
    return [
        ("Submissions", inputs.submissions),
        ("Rubric", inputs.rubric),
        ("Solution", inputs.solution),
        ("Template", inputs.template),
        ("Model for code", inputs.code_model or "as configured"),
        ("Model for text and feedback", inputs.feedback_model or "as configured"),
    ]


# --- dry run


def _dry_run(desk: Desk, folder: Path, inputs: Inputs) -> None:
    st.subheader("1. Look before you grade", anchor=False)
    work = assignments.dry_run(folder)
    running = work.alive
    act(
        "Dry run",
        lambda: work.start(assignments.dry_run_command(desk.backend, inputs)),
        disabled=running,
        help="Reads everything and calls no model.",
    )
    if running:
        wait_for(work, "Reading the submissions and counting tokens …")
        return
    found = dry_runs.found_by(folder)
    if found:
        _findings(desk, found)
    elif work.record():
        st.error(escaped(f"The dry run ended without a result: {work.last_words() or 'its log says nothing'}"))


def _findings(desk: Desk, found: dict[str, Any]) -> None:
    unreadable = sum(bool(item["problem"]) for item in found["submissions"])
    cut = sum(bool(item["cuts"]) for item in found["submissions"])
    columns = st.columns(4)
    columns[0].metric("Submissions", len(found["submissions"]))
    columns[1].metric("Can't be read", unreadable)
    columns[2].metric("Truncated", cut)
    columns[3].metric("Prompt tokens", f"{found['prompt_tokens']:,}")
    how = "counted with the model's tokenizer" if found["exact_tokens"] else "estimated: no tokenizer at hand"
    st.caption(f"{plural(found['prompts'], 'prompt')}; tokens are {how}. {_estimate(desk, found)}")
    for part in found.get("criteria", ()):
        ids = ", ".join(part["ids"]) or "nothing, and writes the summary"
        st.caption(escaped(f"{part['role']}: {part['model']} grades {ids}"))
    for part in found["shared_prefix"]:
        st.caption(f"{part['role']}: the class shares {part['tokens']:,} tokens, {part['percent']}% of its prompts.")
    rows = dry_runs.table(found)
    st.dataframe(rows[:_SHOWN], hide_index=True)
    if len(rows) > _SHOWN:
        st.caption(f"The first {_SHOWN} of {len(rows)}.")


def _estimate(desk: Desk, found: dict[str, Any]) -> str:
    """From whatever this desk has measured."""
    seconds = forecast_s(found["prompt_tokens"], found["prompts"], dry_runs.repeated_tokens(found), desk.rates())
    return f"About {duration(seconds)} at the pace measured so far." if seconds else "How long: after a trial."


# --- starting


def _start(desk: Desk, folder: Path, inputs: Inputs) -> None:
    st.subheader("2. Grade", anchor=False)
    work = assignments.grading(folder)
    running = work.alive
    size, trial, everything, stop = st.columns([2, 1, 1, 1], vertical_alignment="bottom")
    least, most = assignments.TRIAL_SIZES
    size.slider("Submissions in the trial", least, most, least, key="trial size")

    def grade(limit: int = 0) -> None:
        work.start(assignments.grade_command(desk.backend, inputs, folder, limit=limit), limit=limit)

    act(
        "Trial",
        lambda: grade(st.session_state["trial size"]),
        at=trial,
        disabled=running,
        help="Grade a few, look at them, mend the rubric, then grade all.",
    )
    act("Grade all", grade, at=everything, disabled=running, type="primary", help="What is graded already stays.")
    label, means = ("Stop listening", _STOP_CLUSTER) if desk.backend.is_cluster else ("Pause", _STOP_LOCAL)
    act(label, work.stop, at=stop, disabled=not running, help=means)


_STOP_LOCAL = "What is done is kept; 'Grade all' goes on from there."
_STOP_CLUSTER = "The cluster goes on; 'Grade all' gathers what it has done meanwhile. To end it: kvasir cancel."


# --- how it goes


def _progress(desk: Desk, folder: Path) -> None:
    work = assignments.grading(folder)
    running = work.alive

    def progress() -> None:
        with sentences():
            _figures(desk, folder, work)
        if running and not work.alive:
            st.rerun()

    live(progress, REFRESH_S if running else None)


def _figures(desk: Desk, folder: Path, work: Work) -> None:
    view, rows, _ = desk.rows(folder)
    say_problem(view)
    counts = view.counts()
    if not counts.total:
        _why_nothing(work)
        return
    record, alive = work.record(), work.alive
    st.progress(counts.done / counts.total, f"{counts.done} of {plural(counts.total, 'job')}, {counts.failed} failed")
    if alive and record:
        _stages(desk, folder, counts.total)
        done = sum(row.state != "waiting" for row in rows)
        seconds = time.time() - record.started_at
        left = remaining_s(counts.open, desk.stages(folder).refresh()["done"], seconds)
        how_long = "how long it takes is not known yet" if left is None else f"about {duration(left)} left"
        st.caption(f"{done} of {plural(len(rows), 'submission')}; {how_long}. This page may be closed.")
    elif counts.open:
        _why_open(work, counts.open)
    else:
        all_of_it = "The submission" if len(rows) == 1 else f"All {len(rows):,} submissions"
        st.success(f"{all_of_it} of this run {'has' if len(rows) == 1 else 'have'} a grade or a reason why not.")
        if counts.failed:
            again = desk.backend.command("retry", str(folder), "--quiet", "--json")
            act("Try the failed ones again", lambda: work.start(again, "retry"))


def _stages(desk: Desk, folder: Path, total: int) -> None:
    stages = desk.stages(folder).refresh()
    if desk.backend.is_cluster:
        stages = {"waiting or in work on the cluster": total - stages["done"], "done": stages["done"]}
    for column, (stage, number) in zip(st.columns(len(stages)), stages.items(), strict=True):
        column.metric(stage.capitalize(), number)


def _why_nothing(work: Work) -> None:
    if work.alive:
        st.info("Reading the submissions …")
    elif (record := work.record()) and record.stopped:
        st.info("Stopped before it began. 'Grade all' begins it.")
    elif record:
        st.error(escaped(f"The grading ended before it began: {work.last_words() or 'its log says nothing'}"))
    else:
        st.caption("Nothing is graded yet.")


def _why_open(work: Work, still_open: int) -> None:
    record = work.record()
    why = "" if record is None or record.stopped else work.last_words()
    st.warning(escaped(f"{plural(still_open, 'job', 'has', 'have')} no result yet. 'Grade all' goes on. {why}".strip()))

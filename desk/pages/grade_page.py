"""The page from inputs to grades: dry run, trial, the whole class, and progress."""

from pathlib import Path
from typing import Any

import streamlit as st

from desk import assignments, dry_runs
from desk.assignments import Inputs
from desk.pages.address import go
from desk.pages.fleet_page import show_workers
from desk.pages.shared import (
    REFRESH_S,
    Desk,
    action_button,
    decider,
    draw_live,
    show_errors,
    show_metrics,
    show_problem,
    show_table,
    wait_for,
)
from desk.rows import standing_words
from desk.text import escape_markdown
from desk.work import Work
from grading import planning
from grading.roster import UNASSIGNED_QUESTION, keep_answer, kept_files, read_rosters
from producers.batch import batch as batches
from producers.words import plural

_MAX_ROWS = 50  # maximum number of rows in the table of the dry run


def show_grade_page(desk: Desk, folder: Path) -> None:
    """Draw it."""
    inputs = assignments.read_inputs(folder)
    facts = {
        "Submissions": inputs.submissions,
        "Rubric": inputs.rubric,
        "Solution": inputs.solution,
        "Template": inputs.template,
        "Model for code": inputs.code_model or "as configured",
        "Model for text and feedback": inputs.feedback_model or "as configured",
    }
    with st.expander("What is graded, by what"):
        for label, value in facts.items():
            st.markdown(f"**{label}**: {escape_markdown(value) or '–'}")
    if not inputs.rubric:
        st.info("What is graded, and with how many points, is not written yet.")
        if st.button("Write the rubric", type="primary"):
            go("Regrade", str(folder))
        return
    _roster(folder)
    _dry_run(desk, folder, inputs)
    _start(desk, folder, inputs)
    work = assignments.grading_work(folder)
    draw_live(lambda: _figures(desk, folder, work), REFRESH_S, work)
    _questions(desk, folder)


# --- the roster


def _roster(folder: Path) -> None:
    count = len(read_rosters(kept_files(folder)).people)
    uploads: Any = st.file_uploader(
        "Who is in the class: gradebook, worksheet or groups CSV from the LMS",
        ["csv"],
        accept_multiple_files=True,
        help="Use this list to match submissions with students, and to remove the students' names from all texts.",
    )
    if uploads:
        with show_errors():
            count = assignments.save_roster(folder, [(upload.name, upload.getvalue()) for upload in uploads])
    st.caption(f"{count:,} people are known." if count else "No list yet: the files' names alone say whose they are.")


def _questions(desk: Desk, folder: Path) -> None:
    """Show submissions whose owner is not clear. One is chosen, and a click assigns it to a person."""
    view = desk.view(folder)
    questions = planning.questions(view.assignment) if view.assignment else {}
    if not questions or not view.assignment:
        return
    st.subheader("Whose is it?", anchor=False)
    show_table([{"submission": name, "question": question} for name, question in questions.items()], "open questions")
    roster = view.assignment.request.read_roster()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        name = st.selectbox("Submission", list(questions), key="whose")
        owner = st.selectbox(
            "belongs to", roster.possible_owners, index=None, format_func=roster.display_name, key="owner"
        )
        action_button("Assign", lambda: keep_answer(folder, name, owner, decider()), disabled=owner is None)
    st.caption("What was not sent for this is sent by 'Grade all'.")


# --- dry run


def _dry_run(desk: Desk, folder: Path, inputs: Inputs) -> None:
    st.subheader("1. Look before you grade", anchor=False)
    work = assignments.dry_run_work(folder)
    is_running = work.is_alive
    action_button(
        "Dry run",
        lambda: work.start(assignments.dry_run_command(desk.backend, folder, inputs)),
        disabled=is_running,
        help="Read all files and report what would be graded, without calling a model.",
    )
    if is_running:
        wait_for(work, "Reading the submissions and counting tokens …")
        return
    findings = dry_runs.read_findings(folder)
    if findings:
        _findings(desk, findings)
    elif work.record():
        st.error(escape_markdown(f"The dry run ended without a result: {work.last_words() or 'its log says nothing'}"))


def _findings(desk: Desk, findings: dict[str, Any]) -> None:
    figures = {
        "Submissions": len(findings["submissions"]),
        "Can't be read": sum(item["problem"] not in ("", UNASSIGNED_QUESTION) for item in findings["submissions"]),
        "Truncated": sum(bool(item["cuts"]) for item in findings["submissions"]),
        "Prompt tokens": f"{findings['prompt_tokens']:,}",
    }
    show_metrics(figures)
    token_basis = (
        "counted with the model's tokenizer" if findings["exact_tokens"] else "estimated: no tokenizer at hand"
    )
    st.caption(
        f"{plural(findings['prompts'], 'prompt')}; tokens are {token_basis}."
        + (
            f" {plural(len(findings['pilot']), 'kind')} of work: a trial takes one of each."
            if "pilot" in findings
            else ""
        )
    )
    for part in findings.get("criteria", ()):
        ids = ", ".join(part["ids"]) or "nothing, and writes the summary"
        st.caption(escape_markdown(f"{part['role']}: {part['model']} grades {ids}"))
    for part in findings["shared_prefix"]:
        st.caption(f"{part['role']}: the class shares {part['tokens']:,} tokens, {part['percent']}% of its prompts.")
    rows = dry_runs.findings_table(findings)
    st.dataframe(rows[:_MAX_ROWS], hide_index=True)
    if len(rows) > _MAX_ROWS:
        st.caption(f"The first {_MAX_ROWS} of {len(rows)}.")


# --- starting


def _start(desk: Desk, folder: Path, inputs: Inputs) -> None:
    st.subheader("2. Grade", anchor=False)
    work = assignments.grading_work(folder)
    is_running = work.is_alive
    size_column, trial_column, all_column, stop_column = st.columns([2, 1, 1, 1], vertical_alignment="bottom")
    smallest, largest = assignments.TRIAL_SIZES
    size_column.slider("Submissions in the trial", smallest, largest, smallest, key="trial size")

    def grade(limit: int = 0) -> None:
        names = dry_runs.read_findings(folder).get("pilot", [])[:limit]
        work.start(
            assignments.grade_command(desk.backend, inputs, folder, 0 if names else limit, names),
            limit=0 if names else limit,
            names=names,
        )

    action_button(
        "Trial",
        lambda: grade(st.session_state["trial size"]),
        at=trial_column,
        disabled=is_running,
        help="Grade a few submissions first, one of each kind, so that you can still correct the rubric.",
    )
    action_button(
        "Grade all",
        grade,
        at=all_column,
        disabled=is_running,
        type="primary",
        help="Submissions that are already graded stay as they are.",
    )
    label, means = ("Stop listening", _STOP_CLUSTER) if desk.backend.is_cluster else ("Pause", _STOP_LOCAL)
    action_button(label, work.stop, at=stop_column, disabled=not is_running, help=means)

    if desk.backend.is_cluster and batches.exists(folder):
        cancel_command = desk.backend.command("cancel", str(folder))
        action_button(
            "Cancel",
            lambda: _cancelling(folder).start(cancel_command, "cancel"),
            disabled=not desk.view(folder).counts().open,
            help=_CANCEL_CLUSTER,
        )


def _cancelling(folder: Path) -> Work:
    return Work(folder / "runs" / "cancel")


_STOP_LOCAL = "All results so far are kept. 'Grade all' continues with the rest."
_STOP_CLUSTER = "The cluster continues to grade. 'Grade all' collects its results."
_CANCEL_CLUSTER = "Every job that has no result yet is cancelled, for all workers. What is graded stays."


# --- progress


def _figures(desk: Desk, folder: Path, work: Work) -> None:
    view, rows, _ = desk.rows(folder)
    show_problem(view)
    counts = view.counts()
    if not counts.total:
        _why_nothing(work)
        return
    st.progress(
        counts.finished_jobs / counts.total,
        f"{counts.finished_jobs} of {plural(counts.total, 'job')}, {counts.failed} failed",
    )
    if work.is_alive:
        if not desk.backend.is_cluster:
            show_metrics({stage.capitalize(): number for stage, number in desk.stages(folder).refresh().items()})
        finish = desk.stages(folder).finish_words()
        st.caption(f"{standing_words(rows, finish=finish)}. This page may be closed.")
        show_workers(desk, folder)
    elif counts.open:
        _why_open(work, counts.open)
    else:
        subject = "The submission" if len(rows) == 1 else f"All {len(rows):,} submissions"
        st.success(f"{subject} of this run {'has' if len(rows) == 1 else 'have'} a grade or a reason why not.")
        if counts.finished_jobs > counts.succeeded:
            kind = next(name for name in ("failed", "expired", "cancelled") if getattr(counts, name))
            retry_command = desk.backend.command("retry", str(folder), "--quiet", "--json")
            action_button(f"Try the {kind} ones again", lambda: work.start(retry_command, "retry"))
    if counts.open and _cancelling(folder).exit_code:
        st.error(escape_markdown(f"Not cancelled: {_cancelling(folder).last_words()}"))


def _why_nothing(work: Work) -> None:
    record = work.record()
    if record and not record.stopped and not work.is_alive:
        st.error(escape_markdown(f"The grading ended before it began: {work.last_words() or 'its log says nothing'}"))
    elif record and not work.is_alive:
        st.info("Stopped before it began. 'Grade all' begins it.")
    else:
        st.info("Reading the submissions …" if record else "Nothing is graded yet.")


def _why_open(work: Work, still_open: int) -> None:
    record = work.record()
    reason = work.last_words() if record and not record.stopped else ""
    st.warning(
        escape_markdown(
            f"{plural(still_open, 'job', 'has', 'have')} no result yet. 'Grade all' goes on. {reason}".strip()
        )
    )

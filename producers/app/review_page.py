"""One submission: the work beside the grade, and a person's word on it."""

from __future__ import annotations

import getpass
from pathlib import Path

import streamlit as st

from producers.app.markup import Markup
from producers.app.shared import Desk, live, sentences, text
from producers.desk.decisions import Decided, accepted, overrides
from producers.desk.rows import Row
from producers.desk.text import SHOWN_CHARS, escaped, shortened
from producers.desk.view import BatchView
from producers.grade import Item
from producers.grading import CriterionGrade
from producers.report import show_points
from producers.reviews import Override
from producers.rubric import Criterion, Points

_HEIGHT = 760
_MOST_CHARS = 60_000  # of a submission, until everything is asked for


def show(desk: Desk, folder: Path) -> None:
    """Draw it; a click on it draws it alone, without the page around it."""

    def submission() -> None:
        with sentences():
            _submission(desk, folder)

    live(submission, None)


def _submission(desk: Desk, folder: Path) -> None:
    view, rows, decided = desk.rows(folder)
    if view.problem:
        st.error(escaped(view.problem))
    if not rows:
        st.caption("Nothing is graded yet.")
        return
    row = rows[_pick(rows)]
    item = view.item(row.number)
    work, verdict = st.columns(2)
    with work, st.container(height=_HEIGHT, border=True):
        _work(item)
    with verdict, st.container(height=_HEIGHT, border=True):
        _verdict(desk, folder, view, row, decided.get(item.item_id, {}))
    _prompt(view, item)


def _pick(rows: list[Row]) -> int:
    """Index of the submission that is looked at, with ways to the next."""
    if not 0 <= st.session_state.get("submission", 0) < len(rows):
        st.session_state["submission"] = 0
    numbers = range(len(rows))
    # One element that lays out its own is half the work of columns, for the browser as for the desk.
    with st.container(horizontal=True, vertical_alignment="bottom"):
        back = st.session_state.get("submission", 0)
        st.button("Previous", disabled=back == 0, on_click=_turn_to, args=(back - 1,))
        number = int(st.selectbox("Submission", numbers, format_func=lambda at: rows[at].name, key="submission") or 0)
        st.button("Next", disabled=number == len(rows) - 1, on_click=_turn_to, args=(number + 1,))
    return number


def _turn_to(number: int) -> None:
    """Before the page is drawn, so that it is drawn once."""
    st.session_state["submission"] = number


# --- the work


def _work(item: Item) -> None:
    submission = item.submission
    if submission.problem:
        st.error(escaped(submission.problem))
    whole = sum(len(part.text) for part in submission.parts)
    everything = whole <= _MOST_CHARS or st.toggle(f"Show all {whole:,} characters", key=f"all {item.item_id}")
    left = whole if everything else _MOST_CHARS
    shown = Markup()
    for part in submission.parts:
        if left <= 0:
            break
        body, left_out = shortened(part.text, min(left, SHOWN_CHARS))
        shown.caption(f"{part.kind}, {part.where}" if part.where else part.kind)
        shown.verbatim(body)
        if left_out:
            shown.caption(f"{left_out:,} characters more")
        left -= len(body)
    if submission.images_left_out:
        shown.caption(f"Images left out, here and for the models: {submission.images_left_out}.")
    shown.draw()


# --- the grade


def _verdict(desk: Desk, folder: Path, view: BatchView, row: Row, decided: Decided) -> None:
    grade = row.final.grade
    said_of_it = Markup()
    said_of_it.figures(
        {
            "Final points": f"{show_points(row.points) or '–'} / {show_points(grade.max_points)}",
            "By the model": show_points(row.ai) or "–",
        }
    )
    said_of_it.caption("waiting for its results" if row.state == "waiting" else row.final.why_blank or row.state)
    for flag in row.to_check:
        said_of_it.caption(f"⚑ {flag}")
    said_of_it.draw()
    if grade.reason:
        st.warning(escaped(grade.reason))
    assert view.rubric
    by_id = {criterion.id: criterion for criterion in view.rubric.criteria}
    # A key that counts decisions: after one is kept, the form shows what counts now.
    stamp = sum(1 for _ in decided), max((override.time for override in decided.values()), default=0)
    with st.form(f"review {grade.item_id} {stamp}", border=False):
        wanted: dict[str, Points] = {}
        said: dict[str, str] = {}
        for item, final in zip(grade.criteria, row.final.criteria, strict=True):
            given, feedback = _criterion(by_id.get(item.id), item, final)
            said[item.id] = feedback
            if given is not None:
                wanted[item.id] = given
        summary = st.text_area("Summary", row.final.summary)
        reason = st.text_input("Reason for the change")
        with st.container(horizontal=True):
            save = st.form_submit_button("Save the change", type="primary")
            accept = st.form_submit_button("Leave it as it is")
    with sentences():
        if save:
            _keep(desk, folder, overrides(grade, decided, wanted, said, summary, reason, _reviewer()))
        if accept:
            _keep(desk, folder, [accepted(grade, _reviewer())])
    _history(decided)


def _criterion(criterion: Criterion | None, item: CriterionGrade, final: CriterionGrade) -> tuple[Points | None, str]:
    """What the form says of one criterion."""
    model = f"model: {show_points(item.points) or 'no points'} of {show_points(item.max_points)}"
    head = Markup()
    head.title(item.title)
    head.caption(f"{model}; evidence {item.evidence_state}" if item.points is not None else item.reason or model)
    if item.evidence:
        head.verbatim(item.evidence)
    head.draw()
    step = float(criterion.step) if criterion else 1.0
    given = st.number_input(
        f"Points for {item.id}",
        0.0,
        float(item.max_points),
        None if final.points is None else float(final.points),
        step,
        format="%g",
    )
    feedback = st.text_area(f"Feedback on {item.id}", final.feedback)
    return (None if given is None else int(given) if given == int(given) else given), feedback


def _keep(desk: Desk, folder: Path, made: list[Override]) -> None:
    if not made:
        st.info("Nothing was changed.")
        return
    desk.decisions(folder).add(*made)
    st.rerun()


def _history(decided: Decided) -> None:
    if not decided:
        return
    with st.expander("Decisions"):
        for override in sorted(decided.values(), key=lambda each: each.time):
            what = f"{override.criterion_id or 'whole'}: {show_points(override.points) or 'points unchanged'}"
            st.markdown(escaped(f"{what} — {override.reason} {f'({override.reviewer})' if override.reviewer else ''}"))


def _reviewer() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


# --- the prompt


def _prompt(view: BatchView, item: Item) -> None:
    if not item.tasks or not st.toggle("Show the exact prompts and answers"):
        return
    for task in item.tasks:
        result = view.result(task.job_id)
        st.markdown(escaped(f"{task.role}, to {task.model}; job {task.job_id}"))
        text(task.prompt.shared + task.prompt.own)
        text(result.text if result else "no answer yet")

"""Grades leave the house."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from desk.pages.shared import Desk, say_problem, sentences, text
from desk.rounds import graded_class
from desk.text import escaped
from desk.view import BatchView
from grading import export
from grading.export import Exported, FinalGrade, SinceLast
from grading.export.final import apply
from grading.report.graded import save_graded
from producers.words import plural

_SHOWN = 50


def show(desk: Desk, folder: Path) -> None:
    """Draw it."""
    view = desk.views.of(folder)
    say_problem(view)
    if not view.grades:
        st.caption("Nothing is graded yet.")
        return
    unreviewed = st.checkbox("Include grades that need a review and have none", key="include unreviewed")
    st.caption("A submission without points stays blank, never 0, and is listed under the file.")
    kind = st.selectbox("As", list(_KINDS), key=f"export kind {folder}")
    if view.rubric and view.rubric.late:
        _times(folder, view)
    names = (desk.title(folder), view.rubric.title if view.rubric else "")
    what, make, held = _KINDS[str(kind)](folder, unreviewed, names)
    since = _since_last(desk, folder, _COMMANDS[str(kind)], unreviewed, held) if make and kind in _COMMANDS else None
    # Not before the upload is there: who is quicker than it would be told that nothing was uploaded.
    if st.button("Make the file", type="primary", disabled=make is None) and make:
        with sentences():
            graded = graded_class(view)
            if graded:
                save_graded(folder, graded)
            st.session_state["exported"] = (folder, kind, unreviewed, what, make(), since)
    kept = st.session_state.get("exported")
    if kept and kept[:4] == (folder, kind, unreviewed, what):
        _offer(folder, *kept[4:])


def _times(folder: Path, view: BatchView) -> None:
    upload: Any = st.file_uploader("Times of submission (CSV: submission or student_id, submitted_at)", ["csv"])
    if upload:
        with sentences():
            graded = graded_class(view)
            count, remark = export.keep_times(folder, upload.getvalue(), graded) if graded else (0, "")
            st.caption(f"{plural(count, 'time')} read.")
            if remark:
                st.info(escaped(remark))


def _since_last(desk: Desk, folder: Path, kind: str, unreviewed: bool, held: Held) -> SinceLast | None:
    """What this export would change, before it is made; None while that can't be said."""
    with sentences():
        view, _, decided = desk.rows(folder)
        graded = graded_class(view)
        late = export.late_of(folder, graded.late if graded else None)
        made = graded.grades if graded else ()
        grades = [apply(one, decided.get(one.item_id, {}), unreviewed, late) for one in made]
        since = export.since_last(folder, kind, grades, held(grades))
        st.write(escaped(since.said()))
        if since.changed:
            text("\n".join(since.lines()[:_SHOWN]))
        if len(since.changed) > _SHOWN:
            st.caption(f"The first {_SHOWN} of {len(since.changed)}.")
        return since
    return None


def _offer(folder: Path, made: Exported, since: SinceLast | None) -> None:
    if made.asks:
        st.warning("Read this first:")
        text("\n".join(made.asks))
        # Its key says what is confirmed: exactly this file, after exactly these sentences.
        asked = hashlib.sha256("\n".join(made.asks).encode("utf-8", "replace") + made.data).hexdigest()
        if not st.checkbox("I have read this, and this is the file that I want", key=f"confirmed {asked}"):
            return
    # Noted when it is taken, not when it is made: who thinks better of it has given out nothing.
    noted = {"on_click": export.note_given, "args": (folder, since.now)} if since else {"on_click": "ignore"}
    st.download_button(f"Download {made.name}", made.data, made.name, made.media_type, **noted)
    for note in made.notes:
        st.info(escaped(note))
    if made.left_blank:
        st.warning(f"Left blank: {plural(len(made.left_blank), 'submission')}")
        text("\n".join(f"{blank.submission}: {blank.why}" for blank in made.left_blank[:_SHOWN]))
        if len(made.left_blank) > _SHOWN:
            st.caption(f"The first {_SHOWN} of {len(made.left_blank)}.")


# --- each kind: what was chosen, how the file is made (None as long as something is missing), and whose grade it holds

Held = Callable[[Sequence[FinalGrade]], Sequence[FinalGrade]]
Make = tuple[object, Callable[[], Exported] | None, Held]
Names = tuple[str, ...]  # what the assignment is called


def _all(grades: Sequence[FinalGrade]) -> Sequence[FinalGrade]:
    return grades


def _table(folder: Path, unreviewed: bool, _names: Names) -> Make:
    return None, lambda: export.export_csv(folder, include_unreviewed=unreviewed), _all


def _canvas(folder: Path, unreviewed: bool, names: Names) -> Make:
    upload: Any = st.file_uploader("Gradebook exported from Canvas (optional)", ["csv"])
    data = upload.getvalue() if upload else None
    column, scale = "", False
    if data:
        with sentences():
            column = _column(export.assignment_columns(data), names) or ""
        scale = st.checkbox("Scale the points to Canvas's, where those are others")
    else:
        column = st.text_input("Assignment in Canvas, as in Homework 4 (1234)")
    if data and not column:
        return None, None, _all
    return (
        (data, column, scale),
        lambda: export.export_canvas(folder, data, column, include_unreviewed=unreviewed, scale=scale),
        lambda grades: export.held_by_canvas(grades, data, column),
    )


def _column(columns: list[str], names: Names) -> str | None:
    """The column that was chosen; before that the one of this name, or none: nothing is chosen by its place."""
    called = export.matching(columns, *names)
    named = columns.index(called[0]) if len(called) == 1 else None
    picked: str | None = st.selectbox("Assignment", columns, index=named, placeholder="Choose the column")
    return picked


def _moodle(folder: Path, unreviewed: bool, _names: Names) -> Make:
    upload: Any = st.file_uploader("Grading worksheet downloaded from Moodle, which takes only its own back", ["csv"])
    data = upload.getvalue() if upload else b""
    make = (lambda: export.export_moodle(folder, data, include_unreviewed=unreviewed)) if upload else None
    return data, make, lambda grades: export.held_by_moodle(grades, data)


def _moodle_feedback(folder: Path, unreviewed: bool, _names: Names) -> Make:
    return (
        None,
        lambda: export.export_moodle_feedback(folder, include_unreviewed=unreviewed),
        lambda grades: export.held_by_moodle(grades, None),
    )


def _feedback(folder: Path, unreviewed: bool, _names: Names) -> Make:
    kind: Any = st.radio("Files", ("html", "md"), horizontal=True)
    return kind, lambda: export.export_feedback(folder, kind, include_unreviewed=unreviewed), _all


def _replies(folder: Path, _unreviewed: bool, _names: Names) -> Make:
    return None, lambda: export.export_replies(folder), _all


# By the names that `kvasir export` has for them: both count as the same export.
_COMMANDS = {
    "Table (CSV)": "csv",
    "Canvas gradebook": "canvas",
    "Moodle worksheet": "moodle",
    "Moodle feedback files": "moodle-feedback",
    "One feedback file for each student": "feedback",
}
_KINDS: dict[str, Callable[[Path, bool, Names], Make]] = {
    "Table (CSV)": _table,
    "Canvas gradebook": _canvas,
    "Moodle worksheet": _moodle,
    "Moodle feedback files": _moodle_feedback,
    "One feedback file for each student": _feedback,
    "Replies to requests for another look": _replies,
}

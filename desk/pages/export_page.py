"""Grades leave the house."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from desk.pages.shared import Desk, show_errors, show_problem, show_text
from desk.rounds import graded_class_of
from desk.text import escape_markdown
from desk.view import BatchView
from grading import export
from grading.export import ExportFile, FinalGrade, SinceLast
from grading.export.final import apply_decisions
from grading.report.graded import save_graded
from producers.words import plural

_MAX_LINES = 50


def show_export_page(desk: Desk, folder: Path) -> None:
    """Draw it."""
    view = desk.views.of(folder)
    show_problem(view)
    if not view.grades:
        st.caption("Nothing is graded yet.")
        return
    include_unreviewed = st.checkbox("Include grades that need a review and have none", key="include unreviewed")
    st.caption("A submission without points stays blank, never 0, and is listed under the file.")
    kind = st.selectbox("As", list(_KINDS), key=f"export kind {folder}")
    if view.rubric and view.rubric.late:
        _times(folder, view)
    names = (desk.title(folder), view.rubric.title if view.rubric else "")
    choice, make, select_grades = _KINDS[str(kind)](folder, include_unreviewed, names)
    since = (
        _since_last(desk, folder, _COMMANDS[str(kind)], include_unreviewed, select_grades)
        if make and kind in _COMMANDS
        else None
    )
    # Not before the upload is there: who is quicker than it would be told that nothing was uploaded.
    if st.button("Make the file", type="primary", disabled=make is None) and make:
        with show_errors():
            graded_class = graded_class_of(view)
            if graded_class:
                save_graded(folder, graded_class)
            st.session_state["exported"] = (folder, kind, include_unreviewed, choice, make(), since)
    last_export = st.session_state.get("exported")
    if last_export and last_export[:4] == (folder, kind, include_unreviewed, choice):
        _offer(folder, *last_export[4:])


def _times(folder: Path, view: BatchView) -> None:
    upload: Any = st.file_uploader("Times of submission (CSV: submission or student_id, submitted_at)", ["csv"])
    if upload:
        with show_errors():
            graded_class = graded_class_of(view)
            count, remark = export.keep_times(folder, upload.getvalue(), graded_class) if graded_class else (0, "")
            st.caption(f"{plural(count, 'time')} read.")
            if remark:
                st.info(escape_markdown(remark))


def _since_last(
    desk: Desk, folder: Path, kind: str, include_unreviewed: bool, select_grades: SelectGrades
) -> SinceLast | None:
    """What this export would change, before it is made; None while that can't be said."""
    with show_errors():
        view, _, overrides_by_item = desk.rows(folder)
        graded_class = graded_class_of(view)
        late = export.late_of(folder, graded_class.late if graded_class else None)
        class_grades = graded_class.grades if graded_class else ()
        grades = [
            apply_decisions(grade, overrides_by_item.get(grade.item_id, {}), include_unreviewed, late)
            for grade in class_grades
        ]
        since = export.since_last(folder, kind, grades, select_grades(grades))
        st.write(escape_markdown(since.summary()))
        if since.differences:
            show_text("\n".join(since.lines()[:_MAX_LINES]))
        if len(since.differences) > _MAX_LINES:
            st.caption(f"The first {_MAX_LINES} of {len(since.differences)}.")
        return since
    return None


def _offer(folder: Path, file: ExportFile, since: SinceLast | None) -> None:
    if file.asks:
        st.warning("Read this first:")
        show_text("\n".join(file.asks))
        # Its key says what is confirmed: exactly this file, after exactly these sentences.
        digest = hashlib.sha256("\n".join(file.asks).encode("utf-8", "replace") + file.data).hexdigest()
        if not st.checkbox("I have read this, and this is the file that I want", key=f"confirmed {digest}"):
            return
    # Noted when it is taken, not when it is made: who thinks better of it has given out nothing.
    on_download = {"on_click": export.record_export, "args": (folder, since.now)} if since else {"on_click": "ignore"}
    st.download_button(f"Download {file.name}", file.data, file.name, file.media_type, **on_download)
    for note in file.notes:
        st.info(escape_markdown(note))
    if file.left_blank:
        st.warning(f"Left blank: {plural(len(file.left_blank), 'submission')}")
        show_text("\n".join(f"{blank.submission}: {blank.reason}" for blank in file.left_blank[:_MAX_LINES]))
        if len(file.left_blank) > _MAX_LINES:
            st.caption(f"The first {_MAX_LINES} of {len(file.left_blank)}.")


# --- each kind: what was chosen, how the file is made (None as long as something is missing), and whose grade it holds

SelectGrades = Callable[[Sequence[FinalGrade]], Sequence[FinalGrade]]
Make = tuple[object, Callable[[], ExportFile] | None, SelectGrades]
Names = tuple[str, ...]  # what the assignment is called


def _all_grades(grades: Sequence[FinalGrade]) -> Sequence[FinalGrade]:
    return grades


def _table(folder: Path, include_unreviewed: bool, _names: Names) -> Make:
    return None, lambda: export.export_csv(folder, include_unreviewed=include_unreviewed), _all_grades


def _canvas(folder: Path, include_unreviewed: bool, names: Names) -> Make:
    upload: Any = st.file_uploader("Gradebook exported from Canvas (optional)", ["csv"])
    data = upload.getvalue() if upload else None
    column, scale = "", False
    if data:
        with show_errors():
            column = _column(export.assignment_columns(data), names) or ""
        scale = st.checkbox("Scale the points to Canvas's, where those are others")
    else:
        column = st.text_input("Assignment in Canvas, as in Homework 4 (1234)")
    if data and not column:
        return None, None, _all_grades
    return (
        (data, column, scale),
        lambda: export.export_canvas(folder, data, column, include_unreviewed=include_unreviewed, scale=scale),
        lambda grades: export.held_by_canvas(grades, data, column),
    )


def _column(columns: list[str], names: Names) -> str | None:
    """The column that was chosen; before that the one of this name, or none: nothing is chosen by its place."""
    matching_columns = export.matching_columns(columns, *names)
    index = columns.index(matching_columns[0]) if len(matching_columns) == 1 else None
    column: str | None = st.selectbox("Assignment", columns, index=index, placeholder="Choose the column")
    return column


def _moodle(folder: Path, include_unreviewed: bool, _names: Names) -> Make:
    upload: Any = st.file_uploader("Grading worksheet downloaded from Moodle, which takes only its own back", ["csv"])
    data = upload.getvalue() if upload else b""
    make = (lambda: export.export_moodle(folder, data, include_unreviewed=include_unreviewed)) if upload else None
    return data, make, lambda grades: export.held_by_moodle(grades, data)


def _moodle_feedback(folder: Path, include_unreviewed: bool, _names: Names) -> Make:
    return (
        None,
        lambda: export.export_moodle_feedback(folder, include_unreviewed=include_unreviewed),
        lambda grades: export.held_by_moodle(grades, None),
    )


def _feedback(folder: Path, include_unreviewed: bool, _names: Names) -> Make:
    kind: Any = st.radio("Files", ("html", "md"), horizontal=True)
    return kind, lambda: export.export_feedback(folder, kind, include_unreviewed=include_unreviewed), _all_grades


def _replies(folder: Path, _include_unreviewed: bool, _names: Names) -> Make:
    return None, lambda: export.export_replies(folder), _all_grades


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

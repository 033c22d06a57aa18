"""Grades leave the house."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st

from producers import export
from producers.app.shared import Desk, sentences, text
from producers.desk.rounds import graded_class
from producers.desk.text import escaped
from producers.export import Exported
from producers.graded import save_graded

_SHOWN = 50


def show(desk: Desk, folder: Path) -> None:
    """Draw it."""
    view = desk.views.of(folder)
    if view.problem:
        st.error(escaped(view.problem))
    if not view.grades:
        st.caption("Nothing is graded yet.")
        return
    unreviewed = st.checkbox("Include grades that need a review and have none", key="include unreviewed")
    st.caption("A submission without points stays blank, never 0, and is listed under the file.")
    kind = st.selectbox("As", list(_KINDS), key=f"export kind {folder}")
    make = _KINDS[str(kind)](folder, unreviewed)
    # Not before the upload is there: who is quicker than it would be told that nothing was uploaded.
    if st.button("Make the file", type="primary", disabled=make is None) and make:
        with sentences():
            graded = graded_class(view)
            if graded:
                save_graded(folder, graded)
            st.session_state["exported"] = (str(folder), kind, make())
    kept = st.session_state.get("exported")
    if kept and kept[:2] == (str(folder), kind):
        _offer(kept[2])


def _offer(made: Exported) -> None:
    st.download_button(f"Download {made.name}", made.data, made.name, made.media_type, on_click="ignore")
    for note in made.notes:
        st.info(escaped(note))
    if made.left_blank:
        st.warning(f"{len(made.left_blank)} submissions are left blank:")
        text("\n".join(f"{blank.submission}: {blank.why}" for blank in made.left_blank[:_SHOWN]))
        if len(made.left_blank) > _SHOWN:
            st.caption(f"The first {_SHOWN} of {len(made.left_blank)}.")


# --- each kind: what it asks for, and how it is made; None as long as something is missing

Make = Callable[[], Exported] | None


def _table(folder: Path, unreviewed: bool) -> Make:
    return lambda: export.export_csv(folder, include_unreviewed=unreviewed)


def _canvas(folder: Path, unreviewed: bool) -> Make:
    upload: Any = st.file_uploader("Gradebook exported from Canvas (optional)", ["csv"])
    data = upload.getvalue() if upload else None
    column = ""
    if data:
        with sentences():
            column = st.selectbox("Assignment", export.assignment_columns(data)) or ""
    else:
        column = st.text_input("Assignment in Canvas, as in Homework 4 (1234)")
    return lambda: export.export_canvas(folder, data, column, include_unreviewed=unreviewed)


def _moodle(folder: Path, unreviewed: bool) -> Make:
    upload: Any = st.file_uploader("Grading worksheet downloaded from Moodle, which takes only its own back", ["csv"])
    if not upload:
        return None
    return lambda: export.export_moodle(folder, upload.getvalue(), include_unreviewed=unreviewed)


def _moodle_feedback(folder: Path, unreviewed: bool) -> Make:
    return lambda: export.export_moodle_feedback(folder, include_unreviewed=unreviewed)


def _feedback(folder: Path, unreviewed: bool) -> Make:
    kind: Any = st.radio("Files", ("html", "md"), horizontal=True)
    return lambda: export.export_feedback(folder, kind, include_unreviewed=unreviewed)


_KINDS: dict[str, Callable[[Path, bool], Make]] = {
    "Table (CSV)": _table,
    "Canvas gradebook": _canvas,
    "Moodle worksheet": _moodle,
    "Moodle feedback files": _moodle_feedback,
    "One feedback file for each student": _feedback,
}

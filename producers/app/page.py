"""The desk's frame: which assignment, which section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from messages.errors import KvasirError
from producers.app import (
    bound_page,
    export_page,
    fleet_page,
    grade_page,
    home_page,
    regrade_page,
    results_page,
    review_page,
)
from producers.app.address import SECTIONS, follow, keep
from producers.app.shared import Desk, arrive, sentences, the_desk
from producers.app.unsaved import asks_about_unsaved
from producers.desk.backend import Backend
from producers.desk.text import escaped

_PAGES: dict[str, Callable[[Desk, Path], None]] = {
    "Grade": grade_page.show,
    "Results": results_page.show,
    "Review": review_page.show,
    "Regrade": regrade_page.show,
    "Bound": bound_page.show,
    "Export": export_page.show,
    "Fleet": fleet_page.show,
}


# Streamlit's own grey is fainter than 4.5:1, which small text needs to be read.
_STYLE = """<style>
[data-testid="stCaptionContainer"], [data-testid="stCaptionContainer"] p { color: inherit; opacity: 0.9; }
button:enabled kbd { color: inherit; opacity: 1; }
@media (min-width: 641px) {  /* the shorter of work and form stays in sight while the longer one is read */
  .st-key-beside [data-testid="stColumn"] { position: sticky; top: 4rem; align-self: flex-start; }
}
</style>"""


def show(open_backend: Callable[[], Backend]) -> None:
    """Draw the page that the reader is on."""
    st.set_page_config(page_title="Kvasir grading desk", layout="wide")
    st.html(_STYLE)
    with sentences():
        st.sidebar.title("Kvasir", anchor=False)
        desk = the_desk(open_backend)
        arrive()
        follow()
        review_page.keep_typed()
        if desk.backend.notice:
            st.warning(escaped(desk.backend.notice))
        folder = _chosen(desk)
        section = str(st.sidebar.radio("Section", SECTIONS, key="section")) if folder else ""
        if asks_about_unsaved(desk):
            return
        if folder is None:
            home_page.show(desk)
        else:
            st.header(escaped(desk.title(folder)), anchor=False)
            _PAGES[section](desk, folder)
        keep()


def _chosen(desk: Desk) -> Path | None:
    """The assignment of the side bar; None for all. Of an address only folders that the desk knows are opened."""
    names = {str(folder): folder for folder in desk.folders()}
    wanted = st.session_state.get("assignment", "")
    if wanted not in names:
        st.session_state["assignment"] = ""
        if wanted:
            st.warning(escaped(f"This desk has no assignment {Path(wanted).name!r:.80}: choose one of those below."))
    chosen = st.sidebar.selectbox(
        "Assignment", ["", *names], format_func=lambda name: _title(desk, name), key="assignment"
    )
    return names.get(chosen)


def _title(desk: Desk, folder: str) -> str:
    if not folder:
        return "All assignments"
    try:
        return f"{desk.title(Path(folder))} ({Path(folder).name})"
    except KvasirError:  # said where the assignment itself is shown; the others stay in reach
        return Path(folder).name

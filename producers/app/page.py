"""The desk's frame: which assignment, which section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import streamlit as st

from messages.errors import KvasirError
from producers.app import export_page, fleet_page, grade_page, home_page, regrade_page, results_page, review_page
from producers.app.shared import SECTIONS, Desk, arrive, sentences, the_desk
from producers.desk.backend import Backend
from producers.desk.text import escaped

_PAGES: dict[str, Callable[[Desk, Path], None]] = {
    "Grade": grade_page.show,
    "Results": results_page.show,
    "Review": review_page.show,
    "Regrade": regrade_page.show,
    "Export": export_page.show,
    "Fleet": fleet_page.show,
}


def show(open_backend: Callable[[], Backend]) -> None:
    """Draw the page that the reader is on."""
    st.set_page_config(page_title="Kvasir grading desk", layout="wide")
    with sentences():
        st.sidebar.title("Kvasir", anchor=False)
        desk = the_desk(open_backend)
        arrive()
        if desk.backend.notice:
            st.warning(escaped(desk.backend.notice))
        folder = _chosen(desk)
        if folder is None:
            home_page.show(desk)
            return
        st.header(escaped(desk.title(folder)), anchor=False)
        _PAGES[_section()](desk, folder)


def _chosen(desk: Desk) -> Path | None:
    """The assignment of the side bar, which the address keeps too; None for all."""
    names = {str(folder): folder for folder in desk.folders()}
    if "assignment" not in st.session_state:
        st.session_state["assignment"] = _from_address(names)
    if st.session_state["assignment"] not in names:
        st.session_state["assignment"] = ""
    chosen = st.sidebar.selectbox(
        "Assignment", ["", *names], format_func=lambda name: _title(desk, name), key="assignment"
    )
    _address("assignment", chosen)
    return names.get(chosen)


def _from_address(names: dict[str, Path]) -> str:
    wanted = st.query_params.get("assignment", "")
    return wanted if wanted in names else ""


def _title(desk: Desk, folder: str) -> str:
    if not folder:
        return "All assignments"
    try:
        return f"{desk.title(Path(folder))} ({Path(folder).name})"
    except KvasirError:  # said where the assignment itself is shown; the others stay in reach
        return Path(folder).name


def _section() -> str:
    if st.session_state.get("section") not in SECTIONS:
        wanted = st.query_params.get("section", "")
        st.session_state["section"] = wanted if wanted in SECTIONS else "Grade"
    chosen = st.sidebar.radio("Section", SECTIONS, key="section")
    _address("section", str(chosen))
    return str(chosen)


def _address(name: str, value: str) -> None:
    """Keep it in the address; told to the browser only where it is new."""
    if st.query_params.get(name) != value:
        st.query_params[name] = value

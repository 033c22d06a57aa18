"""The desk's frame: the choice of assignment and section."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import streamlit as st

from desk.assignments import grading_work
from desk.backend import Backend
from desk.pages import (
    agreement_page,
    bound_page,
    export_page,
    fleet_page,
    grade_page,
    home_page,
    likeness_page,
    regrade_page,
    results_page,
    review_page,
)
from desk.pages.address import SECTIONS, follow_address, write_address
from desk.pages.markup import Markup
from desk.pages.shared import Desk, get_desk, identify_browser, show_errors
from desk.rows import Row, count_words
from desk.text import escape_markdown
from messages.errors import KvasirError

_PAGES: dict[str, Callable[[Desk, Path], None]] = {
    "Grade": grade_page.show_grade_page,
    "Results": results_page.show_results_page,
    "Review": review_page.show_review_page,
    "Like answers": likeness_page.show_likeness_page,
    "Regrade": regrade_page.show_regrade_page,
    "Agreement": agreement_page.show_agreement_page,
    "Bound": bound_page.show_bound_page,
    "Export": export_page.show_export_page,
    "Fleet": fleet_page.show_fleet_page,
}
# The list of keyboard keys is the same on every page. If it changed with the section, Streamlit would collapse it.
_KEYS = {
    "Tab": "the next field or button; with Shift the one before",
    "Enter, Space": "press the button, or tick the box; on the start page Enter opens the first assignment",
    "↑, ↓": "in Results: the name in the next row, or the one before; Enter opens it",
    "j, k": "in Bound: the next, or the previous, submission",
    "0 to 9": "in Bound: so many points for the criterion marked ▸, which then moves on to the next",
    "?": "this list; in Review all of its keys",
}
_OPEN_KEYS = """<script>
if (!window.kvasirKeys) {
  window.kvasirKeys = true;
  addEventListener("keydown", ({key, target}) => {
    if (key === "Enter" && target === document.body)
      for (const kind of ["primary", "secondary"]) {
        const first = document.querySelector(`[class*=" st-key-open-"] button[kind=${kind}]`);
        if (first) return first.click();
      }
    if (key !== "?" || target.matches("input:not([type=radio], [type=checkbox]), textarea, [contenteditable]")) return;
    document.querySelector(".keys summary")?.click();
  });
}
</script>"""
_MEANINGS = {
    "Agreement": "of model and person",
    "Bound": "how many grades may be wrong",
    "Fleet": "which machines work on what",
}


# Streamlit's grey text has a contrast below 4.5:1, which is too low for small text.
_STYLE = """<style>
[data-testid="stCaptionContainer"], [data-testid="stCaptionContainer"] p { color: inherit; opacity: 0.9; }
button:enabled kbd { color: inherit; opacity: 1; }
@media (min-width: 641px) {  /* the shorter of work and form stays in sight while the longer one is read */
  .st-key-beside [data-testid="stColumn"] { position: sticky; top: 4rem; align-self: flex-start; }
}
.state { margin-right: 1rem; }
.state::before { content: "●"; margin-right: 0.35rem; }
.state-open::before { color: light-dark(#b35900, #e69f00); }
.state-settled::before { color: light-dark(#00805d, #35c49a); }
.state-missing::before { color: light-dark(#c02020, #ff8080); }
.state-waiting::before { color: light-dark(#63666a, #b4b1ab); }
.rows { overflow-x: auto; margin: 0 0 1rem; }
.rows table { border-collapse: collapse; font-size: 0.875rem; width: 100%; }
.rows th, .rows td { padding: 0.35rem 0.6rem; text-align: left; border: 1px solid rgba(128,132,149,0.3); }
.rows th { font-weight: 600; background: rgba(128,132,149,0.12); }
.rows td.number { text-align: right; }
.keys { font-size: 0.875rem; margin-top: 0.5rem; }
.keys summary { cursor: pointer; }
.unsaved:empty { display: none; }
.unsaved { border: 1px solid light-dark(#a04f00, #e69f00); border-radius: 6px; padding: 0.5rem 0.8rem; }
/* A submission's work. Streamlit says by color-scheme whether the page is dark. */
.work-code, .work-prose, .work-output, .work-table { font-size: 0.875rem; line-height: 1.5; margin: 0 0 0.5rem; }
pre[class^="work-"] { white-space: pre-wrap; overflow-wrap: anywhere; padding: 0.5rem 0.75rem; background: none; }
pre.work-code { background: rgba(128,132,149,0.12); border-left: 3px solid rgba(64,120,220,0.7); border-radius: 4px; }
pre.work-prose { font-family: inherit; font-size: 1rem; padding: 0 0.25rem; }
pre.work-output { border-left: 3px solid rgba(128,132,149,0.5); }
pre.work-prose code { font-size: 0.9em; }
.work-heading { font-size: 1.15rem; }
.work-table { border-collapse: collapse; border-left: 3px solid rgba(128,132,149,0.5); }
.work-table th, .work-table td { padding: 0.1rem 0.6rem; text-align: right; overflow-wrap: anywhere; border: none; }
.work-table th { font-weight: 600; border-bottom: 1px solid rgba(128,132,149,0.5); }
.work-plot { display: block; max-width: 100%; height: auto; margin: 0 0 0.5rem; border-radius: 4px; cursor: zoom-in; }
.work-large { min-width: 100%; cursor: zoom-out; image-rendering: pixelated; }
[class^="work-"] { font-style: normal; }
.work-k { color: light-dark(#8a1f9c, #e0a0f0); }
.work-s { color: light-dark(#0a6640, #8fd9a8); }
.work-n { color: light-dark(#0b5aa5, #8cc4ff); }
.work-c { color: light-dark(#5a6472, #b0b8c4); }
mark [class^="work-"] { color: inherit; }  /* on what is highlighted, only ink can be read */
</style>"""


def show_desk_page(open_backend: Callable[[], Backend]) -> None:
    """Draw the page that the reader has chosen."""
    st.set_page_config(page_title="Kvasir grading desk", layout="wide")
    st.html(_STYLE)
    with show_errors():
        st.sidebar.title("Kvasir", anchor=False)
        desk: Desk = get_desk(open_backend)
        identify_browser()
        follow_address()
        if desk.backend.notice:
            st.warning(escape_markdown(desk.backend.notice))
        folder = _choose_assignment(desk)
        # After the desk starts, reading a class of a thousand submissions for the first time takes about a minute.
        with st.spinner("Reading the class …"):
            section = _section(desk, folder) if folder else ""
        with st.sidebar:
            markup = Markup()
            markup.keys(_KEYS)
            markup.draw()
            st.html(_OPEN_KEYS, unsafe_allow_javascript=True)
        if folder is None:
            home_page.show_home_page(desk)
        else:
            st.header(escape_markdown(desk.title(folder)), anchor=False)
            _PAGES[section](desk, folder)
        write_address()


def _choose_assignment(desk: Desk) -> Path | None:
    """Return the assignment chosen in the side bar, or None for all. Only folders that the desk knows are opened."""
    names = {str(folder): folder for folder in desk.folders()}
    assignment_name = st.session_state.get("assignment", "")
    if assignment_name not in names:
        st.session_state["assignment"] = ""
        if assignment_name:
            st.warning(
                escape_markdown(
                    f"This desk has no assignment {Path(assignment_name).name!r:.80}: choose one of those below."
                )
            )
    selection = st.sidebar.selectbox(
        "Assignment", ["", *names], format_func=lambda name: _title(desk, name), key="assignment"
    )
    return names.get(selection)


def _section(desk: Desk, folder: Path) -> str:
    """Return the section chosen in the side bar, which shows what waits in each.

    While figures change by themselves, on the review screen and while a class is graded, only the page counts: the side
    bar is not drawn again then.
    """
    notes = _MEANINGS
    with suppress(KvasirError):  # the section's page reports this error
        waits = _waits(desk.rows(folder)[1])
        notes = notes if st.session_state["section"] == "Review" or grading_work(folder).is_alive else notes | waits
    return str(
        st.sidebar.radio("Section", SECTIONS, captions=[notes.get(name, "") for name in SECTIONS], key="section")
    )


def _waits(rows: Sequence[Row]) -> dict[str, str]:
    """Return what waits in each section, in words and a colour. Sections in which nothing waits are left out."""
    counts = count_words(rows)
    blanks = ", ".join(counts[name] for name in ("review", "points") if name in counts)
    captions = {
        "Grade": [f":gray[●] {counts['open']}"] if "open" in counts else [],
        "Review": [f":orange[●] {counts[name]}" for name in ("review", "reply") if name in counts],
        "Export": [f":red[●] left blank: {blanks}"] if blanks else [],
    }
    return {section: "  \n".join(lines) for section, lines in captions.items() if lines}


def _title(desk: Desk, folder: str) -> str:
    if not folder:
        return "All assignments"
    try:
        return f"{desk.title(Path(folder))} ({Path(folder).name})"
    # The page of that assignment reports the error, and all other pages stay usable.
    except KvasirError:
        return Path(folder).name

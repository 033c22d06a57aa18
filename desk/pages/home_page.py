"""The page with all assignments, and a form for a new one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from desk import assignments
from desk.assignments import Inputs
from desk.dry_runs import read_findings
from desk.pages.address import go, go_next
from desk.pages.shared import Desk, action_button, show_errors, show_problem
from desk.rows import standing_words
from desk.text import escape_markdown
from grading.rubric.rubric import KINDS
from grading.submissions.reading import READABLE, check_apart

_WORK = [kind.removeprefix(".") for kind in READABLE]


def show_home_page(desk: Desk) -> None:
    """Draw it."""
    st.header("Assignments", anchor=False)
    folders = desk.folders()
    for folder in folders:
        with show_errors():
            _show_assignment(desk, folder)
    if not folders:
        st.write("There is none yet.")
    st.subheader("New assignment", anchor=False)
    with show_errors():
        _new(desk)


def _show_assignment(desk: Desk, folder: Path) -> None:
    inputs = assignments.read_inputs(folder)
    view, rows, _ = desk.rows(folder)
    finish = desk.stages(folder).finish_words() if assignments.grading_work(folder).is_alive else ""
    words = standing_words(rows, len(read_findings(folder).get("submissions", ())), finish)
    with st.container(border=True):
        st.markdown("**{}**  \n{}  \n{}".format(*map(escape_markdown, (inputs.title, words, str(folder)))))
        show_problem(view)
        to_review = any(row.needs_review or row.awaits_reply for row in rows)
        if st.button("Review" if to_review else "Open", f"open {folder}", type="primary" if to_review else "secondary"):
            go(
                "Review" if to_review else "Results" if any(row.state != "waiting" for row in rows) else "Grade",
                str(folder),
            )


def _new(desk: Desk) -> None:
    number = st.session_state.setdefault("forms sent", 0)

    def key(name: str) -> str:
        return f"new {number} {name}"

    with st.form("new", border=True):
        st.text_input("Name", key=key("title"))
        st.file_uploader(
            "Submissions: a zip from the LMS, or files",
            ["zip", *_WORK],
            accept_multiple_files=True,
            key=key("uploads"),
        )
        st.text_input("… or a folder, zip or file on this machine", key=key("place"))
        st.file_uploader("Rubric (optional: without one, you write it on the next page)", [*KINDS], key=key("rubric"))
        left, right = st.columns(2)
        left.file_uploader("Solution (optional)", _WORK, key=key("solution"))
        right.file_uploader("Template that students started from (optional)", _WORK, key=key("template"))
        for column, label, name in ((left, "code", "code"), (right, "text and feedback", "feedback")):
            column.selectbox(
                f"Model for {label}",
                ["", *desk.backend.models],
                format_func=lambda model: model or "as configured",
                key=key(name),
            )
        st.checkbox(
            "Grade each criterion separately",
            help="Ask about one criterion at a time. If you change a criterion later, only that criterion is regraded.",
            key=key("one by one"),
        )
        action_button("Create", lambda: _create(desk.backend.home, number), form=True, type="primary")


def _create(home: Path, number: int) -> None:
    """Create an assignment from the form with this number.

    A second click on the same form leads to the same assignment.
    """
    state = st.session_state
    if state["forms sent"] == number:
        state["made"] = _create_from_form(home, lambda name: state[f"new {number} {name}"])
        state["forms sent"] += 1
    if not state["assignment"]:  # unless the person has chosen another assignment, show the new one
        go_next(*state["made"])


def _create_from_form(home: Path, field: Callable[[str], Any]) -> tuple[str, str]:
    """Create the assignment from the form's fields; returns (its first section, its folder)."""
    uploads, place, rubric = field("uploads"), field("place"), field("rubric")
    _check(uploads, place, rubric, (field("solution"), field("template")), home)
    title = field("title")
    folder = assignments.create_folder(home, title)
    files = [(upload.name, upload.getvalue()) for upload in uploads]
    work = assignments.save_submissions(folder, files) if files else assignments.find_submissions(place)
    inputs = Inputs(
        title.strip(),
        str(work),
        str(assignments.save_rubric(folder, rubric.name, rubric.getvalue())) if rubric else "",
        _document(folder / "solution", field("solution")),
        _document(folder / "template", field("template")),
        field("code"),
        field("feedback"),
        ask="criteria" if field("one by one") else "together",
    )
    assignments.save_inputs(folder, inputs)
    return "Grade" if inputs.rubric else "Regrade", str(folder)


def _document(folder: Path, upload: Any) -> str:
    return str(assignments.save_file(folder, upload.name, upload.getvalue())) if upload else ""


def _check(uploads: Any, place: str, rubric: Any, documents: Sequence[Any], home: Path) -> None:
    """Check the form before a folder is created, so that nothing half-made is left."""
    if uploads:
        assignments.check_uploads([upload.name for upload in uploads])
        # If there are several uploads, each is one student's work. The class's table reports errors in these files.
        if len(uploads) == 1:
            assignments.check_zip(uploads[0].name, uploads[0])
    else:
        check_apart(assignments.find_submissions(place), home, "kvasir ui --home")
    if rubric:
        assignments.check_rubric(rubric.name, rubric.getvalue())
    for document in filter(None, documents):
        assignments.check_document(document.name, document.getvalue())

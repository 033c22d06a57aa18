"""The page that exports grades."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import streamlit as st

from desk.pages.shared import Desk, browser_key, show_errors, show_problem, show_text
from desk.rounds import graded_class_of
from desk.rows import what_goes_out
from desk.text import escape_markdown
from desk.view import BatchView
from grading import export
from grading.export import Choices, ExportFile, SinceLast
from grading.export.final import NEEDS_REVIEW, LeftBlank, left_blank
from grading.report.grades import save_graded
from producers.words import plural

_MAX_LINES = 50
# The browser counts the unsaved changes, because the desk does not know about them.
_UNSAVED_HTML = """<p class="unsaved" role="status"></p><script>
(() => {
  const count = (kind) => Object.keys(localStorage).filter((key) => key.startsWith(`kvasir BATCH ${kind} `)).length;
  const words = [[count("draft"), "not saved and will not go out"], [count("act"), "perhaps not at the desk yet"]]
    .filter(([number]) => number)
    .map(([number, state]) => `${number} ${number === 1 ? "change is" : "changes are"} ${state}`);
  const place = document.querySelector(".unsaved");
  if (words.length) place.textContent = `In this browser ${words.join(", ")}: open Review first.`;
})();
</script>"""


def show_export_page(desk: Desk, folder: Path) -> None:
    """Draw it."""
    view = desk.view(folder)
    show_problem(view)
    if not view.grades:
        st.caption("Nothing is graded yet.")
        return
    include_unreviewed = st.checkbox("Include grades that still need review", key="include unreviewed")
    formats = {export_format.title: export_format for export_format in export.DESK_FORMATS}
    export_format = formats[
        str(st.selectbox("As", list(formats), key=f"export kind {folder}", persist_state="session"))
    ]
    _times(folder, view)
    choices: Choices | None = None
    with show_errors():
        choices = export_format.choices_from(
            _PageForm(), (desk.title(folder), view.rubric.title if view.rubric else "")
        )
    asked = (folder, export_format.name, include_unreviewed, choices)
    st.html(_UNSAVED_HTML.replace("BATCH", browser_key(folder)), unsafe_allow_javascript=True)
    if choices is None:
        st.caption("*Make the file* waits for the file, or the choice, that is asked for above.")
    # The button is disabled until the upload has arrived. Otherwise a quick click would fail with an error saying that
    # nothing was uploaded.
    if st.button("Make the file", type="primary", disabled=choices is None) and choices is not None:
        with show_errors():
            graded_class = graded_class_of(view)
            if graded_class:
                save_graded(folder, graded_class)
            # The grades are read before the file is made. If somebody makes a decision in between, the next export
            # counts that decision as a change.
            _, grades = export.final_grades(folder, include_unreviewed)
            export_file = export_format.make(folder, include_unreviewed=include_unreviewed, **choices)
            st.session_state["exported"] = (*asked, export_file, grades)
    last_export = st.session_state.get("exported")
    if not last_export or last_export[:4] != asked:
        blanks = left_blank(row.final for row in desk.rows(folder)[1])
        _list_blank([blank for blank in blanks if not (include_unreviewed and blank.reason.startswith(NEEDS_REVIEW))])
    else:
        export_file, grades = last_export[4:]
        since = None
        if export_format.is_compared:
            with show_errors():
                since = export.since_last(folder, export_format.name, grades, export_file.held_ids)
                st.write(escape_markdown(since.summary()))
                if since.differences:
                    _show_lines(since.lines())
                if since.last:
                    st.caption("Points are compared, not texts.")
            held_ids = export_file.held_ids
            held_grades = [final for final in grades if held_ids is None or final.grade.id in held_ids]
            for sentence in what_goes_out(held_grades, desk.rows(folder)[2]):
                st.write(escape_markdown(sentence))
        _offer(folder, export_file, since)


def _times(folder: Path, view: BatchView) -> None:
    """Ask when the work was handed in, if points are taken off for lateness."""
    if not (view.rubric and view.rubric.late):
        return
    upload: Any = st.file_uploader("Times of submission (CSV: submission or student_id, submitted_at)", ["csv"])
    if upload:
        with show_errors():
            graded_class = graded_class_of(view)
            count, remark = export.keep_times(folder, upload.getvalue(), graded_class) if graded_class else (0, "")
            st.caption(f"{plural(count, 'time')} read.")
            if remark:
                st.info(escape_markdown(remark))


def _offer(folder: Path, file: ExportFile, since: SinceLast | None) -> None:
    if file.asks:
        st.warning("Read this first:")
        show_text("\n".join(file.asks))
        # The checkbox's key contains this digest. A confirmation therefore counts only for this file and the sentences
        # shown with it.
        digest = hashlib.sha256("\n".join(file.asks).encode("utf-8", "replace") + file.data).hexdigest()
        if not st.checkbox("I have read this, and this is the file that I want", key=f"confirmed {digest}"):
            return
    # The export is recorded at the download, because a file that nobody downloads was not given out.
    on_download = {"on_click": export.record_export, "args": (folder, since.now)} if since else {"on_click": "ignore"}
    st.download_button(f"Download {file.name}", file.data, file.name, file.media_type, **on_download)
    for note in file.notes:
        st.info(escape_markdown(note))
    _list_blank(file.left_blank)


def _list_blank(blanks: Sequence[LeftBlank]) -> None:
    """Name those that get no grade: as far as the class tells before the file is made, then as the file says."""
    if blanks:
        st.warning(f"Without a grade, and left blank: {plural(len(blanks), 'submission')}")
        _show_lines([shorten(f"{blank.submission}: {blank.reason}", 200, placeholder=" …") for blank in blanks])


def _show_lines(lines: Sequence[str]) -> None:
    show_text("\n".join(lines[:_MAX_LINES]))
    if len(lines) > _MAX_LINES:
        st.caption(f"The first {_MAX_LINES} of {len(lines)}.")


class _PageForm:
    """A format's `Form`, drawn on the page."""

    def file(self, label: str) -> bytes | None:
        upload: Any = st.file_uploader(label, ["csv"])
        return upload.getvalue() if upload else None

    def text(self, label: str) -> str:
        return str(st.text_input(label))

    def flag(self, label: str) -> bool:
        return bool(st.checkbox(label))

    def one_of(self, label: str, choices: Sequence[str]) -> str:
        return str(st.radio(label, choices, horizontal=True))

    def column(self, label: str, columns: Sequence[str], suggestion: str | None) -> str | None:
        choice: str | None = st.selectbox(
            label,
            columns,
            index=None if suggestion is None else columns.index(suggestion),
            placeholder="Choose the column",
        )
        return choice

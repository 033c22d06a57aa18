"""The page with the class as a table: filtered, sorted, and divided into pages."""

from collections import Counter
from pathlib import Path
from typing import Any

import streamlit as st

from desk import assignments, review_screen
from desk.pages.address import REVIEW_FILTERS, go, write_address
from desk.pages.shared import REFRESH_S, Desk, decider, draw_live, pictures, show_errors, show_problem
from desk.pictures import draw_class, draw_criteria
from desk.review_screen.content import kind_of
from desk.rows import ORDERS, Filter, Row, open_questions, page_count, page_of, select, standing_words, without_points
from desk.text import escape_markdown
from grading import export
from grading.alarms import class_alarms
from grading.report.grades import OUTCOMES, outcomes, show_points
from producers.words import plural

_FOLDER = Path(review_screen.__file__).parent
_TABLE = st.components.v2.component(
    "kvasir_results",
    html='<div class="kv-class"></div>',
    css=(_FOLDER / "table.css").read_text("utf-8"),
    js=(_FOLDER / "table.js").read_text("utf-8"),
    isolate_styles=False,
)


def show_results_page(desk: Desk, folder: Path) -> None:
    """Draw it."""
    is_running = assignments.grading_work(folder).is_alive
    draw_live(lambda: _table(desk, folder), 2 * REFRESH_S if is_running else None)
    with show_errors():
        _requests(desk, folder)
        _pictures(desk, folder)


def _table(desk: Desk, folder: Path) -> None:
    view, rows, _ = desk.rows(folder)
    show_problem(view)
    if not rows:
        st.caption("Nothing is graded yet.")
        return
    for alarm in class_alarms(view.grades, view.rubric) if view.rubric else ():
        st.warning(escape_markdown(alarm))
    for reason, count in Counter(row.final.why_blank for row in without_points(rows)).most_common(3):
        st.warning(escape_markdown(f"{plural(count, 'submission')} without points: {reason}"))
    reviewed = f"{sum(row.final.is_reviewed for row in rows)} reviewed; {standing_words(rows)}."
    st.caption(f"{plural(len(rows), 'submission')}: {outcomes(row.final.grade for row in rows)}. {reviewed}")
    if questions := open_questions(rows):
        st.markdown(escape_markdown(f"Open questions: {questions}. Like answers groups those that are alike."))
        if st.button("Review", type="primary"):
            go("Review")
    selection = select(rows, _filter())
    pages = page_count(selection)
    st.session_state["page"] = min(max(1, st.session_state.get("page", 1)), pages)
    page = int(st.number_input("Page", 1, pages, key="page")) if pages > 1 else 1
    write_address()
    page_rows = page_of(selection, page)
    criteria = [criterion.id for criterion in view.rubric.criteria] if view.rubric else []
    has_requests = any(row.requests for row in rows)
    key = f"table {folder} {page}"
    chosen_ids = (st.session_state.get(key) or {}).get("chosen") or []
    table: Any = _TABLE(
        key=key,
        data={
            "columns": [*_cells(rows[0], criteria), *(["asked"] if has_requests else [])],
            "rows": [_line(row, criteria, has_requests) for row in page_rows],
            "chosen": chosen_ids,
        },
        on_open_change=lambda: None,
        on_chosen_change=lambda: None,
    )
    if table.open in {row.final.grade.item_id for row in rows}:
        go("Review", submission=table.open)
    chosen_rows = [row for row in page_rows if row.final.grade.item_id in chosen_ids]
    if st.button("Regrade selected", disabled=not chosen_rows):
        st.session_state["regrade names"] = [row.final.submission for row in chosen_rows]
        go("Regrade")


def _filter() -> Filter:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = st.text_input("Name contains", key="name")
        states = tuple(st.multiselect("State", OUTCOMES, key="state"))
        is_reviewed = REVIEW_FILTERS[str(st.selectbox("Reviewed", list(REVIEW_FILTERS), key="reviewed"))]
        order = st.selectbox("Order", ORDERS, key="order")
        needs_review = st.checkbox("Needs review only", key="review")
    return Filter(text, states, is_reviewed, needs_review, order=order)


def _line(row: Row, criteria: list[str], has_requests: bool) -> dict[str, Any]:
    """Return a row of the table: whose it is, its cells, and the kind of its state."""
    request_state = "waits for a reply" if row.awaits_reply else "replied" if row.requests else ""
    cells = [*_cells(row, criteria).values(), *([request_state] if has_requests else [])]
    return {"id": row.final.grade.item_id, "cells": cells, "state": kind_of(row)}


def _cells(row: Row, criteria: list[str]) -> dict[str, str]:
    points = {item.id: item.points for item in row.final.criteria}
    return {
        "submission": row.name,
        "state": row.state,
        "final points": show_points(row.final.points),
        "by the model": show_points(row.final.grade.points),
        "reviewed": "yes" if row.final.is_reviewed else "",
        "needs review": "; ".join(row.needs_review),
        **{id: show_points(points.get(id)) for id in criteria},
        "remarks": row.final.grade.reason or "; ".join(row.final.grade.remarks),
    }


def _pictures(desk: Desk, folder: Path) -> None:
    view, rows, _ = desk.rows(folder)
    rubric, stamp = view.rubric, desk.version(folder)
    charts_html = pictures(desk, ("class", folder), stamp, lambda: draw_class(rubric, rows)) if rubric else ""
    if not charts_html or not rubric:
        return
    st.subheader("The class in pictures", anchor=False)
    st.html(charts_html)
    if st.toggle("Each criterion", key="criteria drawn"):
        st.html(pictures(desk, ("criteria", folder), stamp, lambda: draw_criteria(rubric, rows)))


def _requests(desk: Desk, folder: Path) -> None:
    """Read students' requests for another look, from a file made by a form or a learning platform."""
    _, rows, _ = desk.rows(folder)
    if not rows:
        return
    if st.toggle("Requests for another look", key="requests"):
        upload: Any = st.file_uploader("CSV: submission or student_id, request, and criterion if you like", ["csv"])
        if upload:
            with show_errors():
                _read_in(folder, rows, upload)
        waiting_count = sum(row.awaits_reply for row in rows)
        st.caption(f"{plural(waiting_count, 'submission')} with a request that waits for its reply: Review shows them.")


def _read_in(folder: Path, rows: list[Row], upload: Any) -> None:
    """Read each upload only once, then redraw the table, which shows who has asked."""
    file_id, message = st.session_state.get("requests read", ("", ""))
    if file_id != upload.file_id:
        requests, remark = export.requests_from(folder, upload.getvalue(), [row.final for row in rows], decider())
        new = export.add_requests(folder, requests)
        message = f"{plural(len(requests), 'request')} read, {new} of them new. {remark}".strip()
        st.session_state["requests read"] = (upload.file_id, message)
        st.rerun()
    st.caption(message)

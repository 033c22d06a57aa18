"""The class as a table: filtered, sorted, in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from desk import assignments
from desk.agreement import agreement
from desk.pages.address import REVIEWED, go, keep
from desk.pages.shared import REFRESH_S, Desk, decider, live, pictures, say_problem, sentences, table
from desk.pictures import of_class, of_criteria
from desk.rows import ORDERS, Filter, Row, counters, page_count, page_of, select
from desk.text import escaped
from grading import export
from grading.alarms import class_alarms
from grading.report.grades import OUTCOMES, outcomes, show_points
from producers.words import plural

# In pixels. Streamlit goes by the first rows, and cuts off the words of later ones.
_WIDTHS = {"needs review": 230}
_COLOURS = {
    "graded": "green",
    "empty": "blue",
    "unreadable": "red",
    "incomplete": "orange",
    "failed": "red",
    "waiting": "gray",
}


def show(desk: Desk, folder: Path) -> None:
    """Draw it."""
    running = assignments.grading(folder).alive

    def whole_class() -> None:
        with sentences():
            _table(desk, folder)

    live(whole_class, 2 * REFRESH_S if running else None)
    with sentences():
        _requests(desk, folder)
        _agreement(desk, folder)
        _pictures(desk, folder)


def _table(desk: Desk, folder: Path) -> None:
    view, rows, _ = desk.rows(folder)
    say_problem(view)
    if not rows:
        st.caption("Nothing is graded yet.")
        return
    for alarm in class_alarms(view.grades, view.rubric) if view.rubric else ():
        st.warning(escaped(alarm))
    counted = counters(rows)
    st.caption(
        f"{plural(counted.total, 'submission')}: {outcomes(row.final.grade for row in rows)}. "
        f"{counted.reviewed} reviewed; {counted.need_review} of {counted.total} need review."
    )
    kept = select(rows, _filter())
    pages = page_count(kept)
    st.session_state["page"] = min(max(1, st.session_state.get("page", 1)), pages)
    page = int(st.number_input("Page", 1, pages, key="page")) if pages > 1 else 1
    keep()
    shown = page_of(kept, page)
    criteria = [criterion.id for criterion in view.rubric.criteria] if view.rubric else []
    asked = any(row.requests for row in rows)
    event: Any = st.dataframe(
        [_cells(row, criteria) | ({"asked": _asked(row)} if asked else {}) for row in shown],
        hide_index=True,
        column_config={
            "state": st.column_config.MultiselectColumn(width=110, options=OUTCOMES, color=list(_COLOURS.values())),
            **{name: st.column_config.TextColumn(width=width) for name, width in _WIDTHS.items()},
        },
        on_select="rerun",
        selection_mode="multi-row",
        key=f"table {folder} {page}",
    )
    _act([shown[index] for index in event.selection.rows if index < len(shown)], shown)


def _filter() -> Filter:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = st.text_input("Name contains", key="name")
        states = tuple(st.multiselect("State", OUTCOMES, key="state"))
        reviewed = REVIEWED[str(st.selectbox("Reviewed", list(REVIEWED), key="reviewed"))]
        order = st.selectbox("Order", ORDERS, key="order")
        needs_review = st.checkbox("Needs review only", key="review")
    return Filter(text, states, reviewed, needs_review, order=order)


def _asked(row: Row) -> str:
    return "" if not row.requests else "waits for a reply" if row.asked else "replied"


def _cells(row: Row, criteria: list[str]) -> dict[str, object]:
    points = {item.id: item.points for item in row.final.criteria}
    return {
        "submission": row.name,
        "state": [row.state],
        "final points": show_points(row.points),
        "by the model": show_points(row.ai),
        "reviewed": "yes" if row.reviewed else "",
        "needs review": "; ".join(row.needs_review),
        **{id: show_points(points.get(id)) for id in criteria},
        "remarks": row.final.grade.reason or "; ".join(row.remarks),
    }


def _pictures(desk: Desk, folder: Path) -> None:
    view, rows, _ = desk.rows(folder)
    rubric, stamp = view.rubric, desk.version(folder)
    drawn = pictures(desk, ("class", folder), stamp, lambda: of_class(rubric, rows)) if rubric else ""
    if not drawn or not rubric:
        return
    st.subheader("The class in pictures", anchor=False)
    st.html(drawn)
    if st.toggle("Each criterion", key="criteria drawn"):
        st.html(pictures(desk, ("criteria", folder), stamp, lambda: of_criteria(rubric, rows)))


def _act(chosen: list[Row], shown: list[Row]) -> None:
    names = {row.final.grade.item_id: row.name for row in (chosen or shown)}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        item = st.selectbox("Submission", list(names), format_func=names.__getitem__, key="open which")
        opened = st.button("Open", type="primary")
        regrade = st.button("Regrade selected", disabled=not chosen)
    if opened and item:
        go("Review", submission=item)
    if regrade:
        st.session_state["regrade names"] = [row.name for row in chosen]
        go("Regrade")


def _requests(desk: Desk, folder: Path) -> None:
    """Students' requests for another look, as a form or a learning platform collected them."""
    _, rows, _ = desk.rows(folder)
    if not rows:
        return
    if st.toggle("Requests for another look", key="requests"):
        upload: Any = st.file_uploader("CSV: submission or student_id, request, and criterion if you like", ["csv"])
        if upload:
            with sentences():
                _read_in(folder, rows, upload)
        waiting = sum(row.asked for row in rows)
        st.caption(f"{plural(waiting, 'submission')} with a request that waits for its reply: Review shows them.")


def _read_in(folder: Path, rows: list[Row], upload: Any) -> None:
    """Once for each upload, and then the table again, which shows who has asked."""
    which, said = st.session_state.get("requests read", ("", ""))
    if which != upload.file_id:
        found, remark = export.requests_from(upload.getvalue(), [row.final for row in rows], decider())
        new = export.add_requests(folder, found)
        said = f"{plural(len(found), 'request')} read, {new} of them new. {remark}".strip()
        st.session_state["requests read"] = (upload.file_id, said)
        st.rerun()
    st.caption(said)


def _agreement(desk: Desk, folder: Path) -> None:
    view, rows, decided = desk.rows(folder)
    if not view.rubric or not any(row.reviewed for row in rows):
        return
    st.subheader("Agreement between model and person", anchor=False)
    found = agreement(view.rubric.criteria, view.grades, decided)
    table(
        [
            {
                "criterion": row.title,
                "reviewed": row.reviewed,
                "same points": f"{row.same} ({row.share:.0%})",
                "within a step": row.near,
                "person − model, mean": round(row.mean_difference, 2),
                "largest difference": row.largest,
            }
            for row in found
        ],
        "Agreement between model and person",
    )

"""The class as a table: filtered, sorted, in pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from producers.alarms import class_alarms
from producers.app.shared import REFRESH_S, Desk, go, live, sentences
from producers.desk import assignments
from producers.desk.agreement import agreement
from producers.desk.rows import ORDERS, STATES, Filter, Row, counters, page_count, page_of, select
from producers.desk.text import escaped
from producers.report import show_points

_REVIEWED = {"all": None, "reviewed": True, "not reviewed": False}


def show(desk: Desk, folder: Path) -> None:
    """Draw it."""
    running = assignments.grading(folder).alive

    def table() -> None:
        with sentences():
            _table(desk, folder)

    live(table, 2 * REFRESH_S if running else None)
    with sentences():
        _agreement(desk, folder)


def _table(desk: Desk, folder: Path) -> None:
    view, rows, _ = desk.rows(folder)
    if view.problem:
        st.error(escaped(view.problem))
    if not rows:
        st.caption("Nothing is graded yet.")
        return
    for alarm in class_alarms(view.grades, view.rubric) if view.rubric else ():
        st.warning(escaped(alarm))
    counted = counters(rows)
    st.caption(
        f"{counted.total} submissions: {counted.graded} graded, {counted.failed} without points, "
        f"{counted.waiting} waiting, {counted.reviewed} reviewed."
    )
    kept = select(rows, _filter())
    pages = page_count(kept)
    page = int(st.number_input("Page", 1, pages, 1, key="page")) if pages > 1 else 1
    shown = page_of(kept, page)
    criteria = [criterion.id for criterion in view.rubric.criteria] if view.rubric else []
    event: Any = st.dataframe(
        [_cells(row, criteria) for row in shown],
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
        key=f"table {folder} {page}",
    )
    _act([shown[index] for index in event.selection.rows if index < len(shown)], shown)


def _filter() -> Filter:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = st.text_input("Name contains", key="name contains")
        states = tuple(st.multiselect("State", STATES, key="states"))
        reviewed = _REVIEWED[str(st.selectbox("Reviewed", list(_REVIEWED), key="reviewed"))]
        order = st.selectbox("Order", ORDERS, key="order")
        to_check = st.checkbox("To check only", key="to check")
    return Filter(text, states, reviewed, to_check, order)


def _cells(row: Row, criteria: list[str]) -> dict[str, object]:
    points = {item.id: item.points for item in row.final.criteria}
    return {
        "submission": row.name,
        "state": row.state,
        "final points": show_points(row.points),
        "by the model": show_points(row.ai),
        "reviewed": "yes" if row.reviewed else "",
        "to check": len(row.to_check),
        **{id: show_points(points.get(id)) for id in criteria},
        "remark": row.final.grade.reason or "; ".join(row.to_check),
    }


def _act(chosen: list[Row], shown: list[Row]) -> None:
    names = {row.number: row.name for row in (chosen or shown)}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        number = st.selectbox("Submission", list(names), format_func=names.__getitem__, key="open which")
        opened = st.button("Open", type="primary")
        regrade = st.button("Regrade selected", disabled=not chosen)
    if opened and number is not None:
        go("Review", submission=number)
    if regrade:
        st.session_state["regrade names"] = [row.name for row in chosen]
        go("Regrade")


def _agreement(desk: Desk, folder: Path) -> None:
    view, rows, decided = desk.rows(folder)
    if not view.rubric or not any(row.reviewed for row in rows):
        return
    st.subheader("Agreement between model and person", anchor=False)
    found = agreement(view.rubric.criteria, view.grades, decided)
    st.dataframe(
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
        hide_index=True,
    )

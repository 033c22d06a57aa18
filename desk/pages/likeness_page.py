"""Like answers to one criterion, decided on together."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import streamlit as st

from desk import likeness
from desk.decisions import Overrides
from desk.pages.markup import Markup
from desk.pages.shared import Desk, action_button, decider, draw_live, show_problem
from desk.rows import Row
from desk.text import escape_markdown
from desk.view import BatchView
from grading.likeness import (
    MAX_DISTANCE,
    Answer,
    answer_of,
    group_answers,
    has_text_likeness,
    reads_the_same,
)
from grading.points import CriterionGrade
from grading.quotes import quoted_lines
from grading.report.grades import show_points
from grading.reviews import Override, append_where_unchanged, undo_together
from grading.rubric.rubric import Criterion
from producers.words import join_with_and, plural

_MOST_MEMBERS = 40  # that are shown, and decided on, at once
_MOST_DECISIONS = 10  # that can be undone here
_TEXT_HELP = (
    "Answers in like words with equal points. A decision that is right for one may be wrong for another: read what is "
    "highlighted, and tick those that you mean."
)


def show_likeness_page(desk: Desk, folder: Path) -> None:
    """Draw it; a click on it draws it alone, without the page around it."""
    draw_live(lambda: _groups(desk, folder))


def _groups(desk: Desk, folder: Path) -> None:
    view, rows, overrides_by_item = desk.rows(folder)
    if desk.by_people(folder) != st.session_state["counted"]:  # the side bar says how many still wait
        st.rerun()
    show_problem(view)
    if not rows or not view.rubric:
        st.caption("Nothing is graded yet.")
        return
    criteria = {criterion.id: criterion for criterion in view.rubric.criteria}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        criterion = criteria[st.selectbox("Criterion", list(criteria), key="like criterion")]
        takes_all = st.toggle("Answers without a doubt too", key="like all")
        by_text = st.toggle("Like texts too", disabled=not has_text_likeness(), key="like texts", help=_TEXT_HELP)
    undecided = likeness.undecided_rows(rows, overrides_by_item, criterion.id, doubtful_only=not takes_all)
    answers = _answers(desk, folder, view, rows, criterion.id)
    rows_by_id = {row.final.grade.item_id: row for row in undecided}
    groups = group_answers((answers[id] for id in rows_by_id), MAX_DISTANCE if by_text else 0.0)
    shared_groups = [group for group in groups if len(group) > 1]
    count = sum(map(len, shared_groups))
    kind = "answer" if takes_all else "doubtful answer"
    st.caption(
        f"{plural(len(undecided), kind)} to {escape_markdown(criterion.title)}: {count:,} in "
        f"{plural(len(shared_groups), 'group')}, {len(undecided) - count:,} like no other, which are decided in Review."
    )
    if message := st.session_state.pop("said of group", ""):
        st.info(escape_markdown(message))
    if shared_groups:
        state = st.session_state
        state["like group"] = min(state.get("like group") or 0, len(shared_groups) - 1)
        number = st.selectbox(
            "Group", range(len(shared_groups)), format_func=lambda at: _label(at, shared_groups), key="like group"
        )
        _group(folder, criterion, shared_groups[number], rows_by_id, overrides_by_item)
    _decisions(folder, criterion.id, rows, overrides_by_item)


def _answers(desk: Desk, folder: Path, view: BatchView, rows: Sequence[Row], criterion_id: str) -> dict[str, Answer]:
    """Every submission's answer, by its id."""

    def read() -> dict[str, Answer]:
        return {
            row.final.grade.item_id: answer_of(row.final.grade.item_id, grade, view.item(row.number).submission)
            for row in rows
            if (grade := _grade_of(row, criterion_id))
        }

    return desk.get_or_make(("answers", folder, criterion_id), view.version, read)


def _grade_of(row: Row, criterion_id: str) -> CriterionGrade | None:
    return next((item for item in row.final.grade.criteria if item.id == criterion_id), None)


def _label(number: int, groups: Sequence[Sequence[Answer]]) -> str:
    first, size = groups[number][0], len(groups[number])
    words = " ".join((first.quote or first.passage).split())
    return f"{number + 1} of {len(groups)}: {size} answers, model: {show_points(first.points)}, “{words:.60}”"


def _group(
    folder: Path,
    criterion: Criterion,
    group: Sequence[Answer],
    rows_by_id: Mapping[str, Row],
    overrides_by_item: Mapping[str, Overrides],
) -> None:
    first, members = group[0], group[:_MOST_MEMBERS]
    tick_keys = {answer.item_id: f"like {criterion.id} {first.item_id} {answer.item_id}" for answer in members}
    grade = _grade_of(rows_by_id[first.item_id], criterion.id)
    assert grade
    head = Markup()
    if criterion.guidance:
        head.caption(criterion.guidance)
    head.verbatim(first.passage, dict.fromkeys(quoted_lines(first.passage, [first.quote]), criterion.id))
    head.draw()
    if len(group) > len(members):
        st.caption(f"The first {len(members)} of {len(group)}; the others are the next group.")
    with st.container(horizontal=True):
        for label, value in (("Tick all", True), ("Tick none", False)):
            st.button(label, on_click=st.session_state.update, args=[dict.fromkeys(tick_keys.values(), value)])

    def decide() -> None:
        state = st.session_state
        ticked = [answer for answer in members if state[tick_keys[answer.item_id]]]
        points, reason = state[f"points {tick_keys[first.item_id]}"], state["like reason"] or ""
        points = int(points) if points == int(points) else points
        decisions = likeness.decide_together(ticked, criterion.id, points, reason, overrides_by_item, decider())
        left_ids = append_where_unchanged(folder, decisions)
        state["said of group"] = _outcome("decided", len(ticked), [rows_by_id[id].name for id in left_ids])

    with st.form(f"form {tick_keys[first.item_id]}"):
        for answer in members:
            row = rows_by_id[answer.item_id]
            is_same = reads_the_same(first, answer)
            st.session_state.setdefault(tick_keys[answer.item_id], is_same)
            note = "" if answer is first else ": in the same words" if is_same else ": differs where it is highlighted"
            st.checkbox(escape_markdown(f"{row.name}{note}"), key=tick_keys[answer.item_id])
            if not is_same:
                markup = Markup()
                markup.changes(likeness.word_changes(first.passage, answer.passage))
                markup.draw()
        with st.container(horizontal=True, vertical_alignment="bottom"):
            st.number_input(
                "Points for those that are ticked",
                *map(float, (grade.min_points, grade.max_points)),
                float(first.points or 0),
                float(criterion.step),
                format="%g",
                key=f"points {tick_keys[first.item_id]}",
            )
            reasons = likeness.used_reasons(overrides_by_item, criterion.id)
            st.selectbox("Reason", reasons, key="like reason", accept_new_options=True)
            action_button("Decide on those that are ticked", decide, form=True, type="primary")


def _outcome(verb: str, count: int, left_names: Sequence[str]) -> str:
    left = f" Left as it is, since somebody has decided meanwhile: {join_with_and(left_names)}." if left_names else ""
    return f"{plural(count - len(left_names), 'answer')} {verb}.{left}"


def _decisions(
    folder: Path, criterion_id: str, rows: Sequence[Row], overrides_by_item: Mapping[str, Overrides]
) -> None:
    """What was decided on this criterion, with a way back for all that was decided at once."""
    names = {row.final.grade.item_id: row.name for row in rows}
    for decisions in likeness.decided_together(overrides_by_item, criterion_id)[:_MOST_DECISIONS]:
        last = decisions[0]
        by = f" ({last.reviewer})" if last.reviewer else ""

        def undo(decisions: Sequence[Override] = decisions) -> None:
            left_ids = undo_together(folder, decisions, decider())
            left_names = [names.get(id, id) for id in left_ids]
            st.session_state["said of group"] = _outcome("as before", len(decisions), left_names)

        with st.container(horizontal=True, vertical_alignment="center"):
            points = show_points(last.points) or "points unchanged"
            st.markdown(escape_markdown(f"{plural(len(decisions), 'answer')}: {points} — {last.reason}{by}"))
            action_button("Undo", undo, key=f"undo {criterion_id} {last.item_id} {last.time}")

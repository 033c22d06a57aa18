"""The page with like answers to one criterion, on which a person decides together."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import streamlit as st

from desk.decisions import TOGETHER_REASON, Overrides
from desk.pages.markup import Markup
from desk.pages.shared import Desk, action_button, decider, draw_live
from desk.rows import undecided_rows
from desk.text import escape_markdown
from grading.likeness import MAX_DISTANCE, CriterionAnswer, answer_of, group_answers
from grading.quotes import quoted_lines
from grading.report.grades import show_points
from grading.reviews import decide_together, decided_together, undo_together
from grading.rubric.rubric import Criterion, exact, plain
from producers.words import join_with_and, plural, shorten_names

# One decision covers at most this many answers. The page offers to undo at most this many decisions.
_MOST_SHOWN = 40


def show_likeness_page(desk: Desk, folder: Path) -> None:
    """Draw the page. A click inside it redraws only this part, not the page around it."""
    draw_live(lambda: _show_groups(desk, folder))


def _show_groups(desk: Desk, folder: Path) -> None:
    view, rows, standing = desk.rows(folder)
    if not rows or not view.rubric:
        st.caption(escape_markdown(view.problem or "Nothing is graded yet."))
        return
    with st.container(horizontal=True, vertical_alignment="bottom"):
        criterion = st.selectbox("Criterion", view.rubric.criteria, format_func=lambda each: each.title, key="like to")
        takes_all = st.toggle("Answers without a doubt too", key="like all")
        by_text = st.toggle(
            "Like texts too",
            key="like texts",
            help="Also group answers that have similar wording and equal points. A decision that is right for one "
            "answer can be wrong for another. Read the highlighted differences, and tick the answers that your "
            "decision is for.",
        )
        is_blind = st.toggle("Without names", bool(st.session_state.get("blind")), key="like blind")
    answers = desk.get_or_make(
        ("answers", folder, criterion.id),
        view.version,
        lambda: {
            row.final.grade.item_id: answer_of(row.final.grade.item_id, item, view.item(row.number).submission)
            for row in rows
            for item in row.final.grade.criteria
            if item.id == criterion.id
        },
    )
    undecided = undecided_rows(rows, standing, criterion.id, doubtful_only=not takes_all)
    all_groups = desk.get_or_make(
        ("like answers", folder, criterion.id),
        (desk.version(folder), takes_all, by_text),
        lambda: group_answers([answers[id] for id in undecided], MAX_DISTANCE if by_text else 0.0),
    )
    groups = [group for group in all_groups if len(group) > 1]
    st.caption(
        f"{plural(len(undecided), 'answer' if takes_all else 'doubtful answer')} to decide on: "
        f"{sum(map(len, groups)):,} in {plural(len(groups), 'group')}, "
        f"{len(all_groups) - len(groups):,} like no other, which are decided on in Review."
    )
    if message := st.session_state.pop("said of group", ""):
        st.info(escape_markdown(message))
    names = {row.final.grade.item_id: row.final.grade.item_id[:8] if is_blind else row.name for row in rows}
    if groups:
        number = st.selectbox(
            "Group",
            range(len(groups)),
            format_func=lambda at: _group_words(groups[at], names),
        )
        _show_group(folder, criterion, groups[number], names, standing)
    _show_decisions(folder, criterion.id, names, standing)


def _group_words(group: Sequence[CriterionAnswer], names: Mapping[str, str]) -> str:
    people = shorten_names([names[answer.item_id] for answer in group])
    return f"{len(group)} answers, by {people}: “{(group[0].quote or group[0].text):.60}”"


def _show_group(
    folder: Path,
    criterion: Criterion,
    group: Sequence[CriterionAnswer],
    names: Mapping[str, str],
    standing: Mapping[str, Overrides],
) -> None:
    """Show one of the group's answers, how the others differ from it, and the decision for those that are ticked."""
    state, first = st.session_state, group[0]
    markup = Markup()
    markup.caption(criterion.guidance)
    markup.verbatim(first.passage, dict.fromkeys(quoted_lines(first.passage, [first.quote]), criterion.id))
    markup.draw()
    all_ticked = st.toggle("Tick all")
    key = f"like {criterion.id} {first.item_id} {all_ticked}"

    def decide() -> list[str]:
        ids = [answer.item_id for answer in group[:_MOST_SHOWN] if state[f"{key} {answer.item_id}"]]
        points, reason = plain(exact(state[f"{key} points"])), state[f"{key} reason"] or ""
        return decide_together(folder, ids, criterion.id, points, reason, standing, decider())

    with st.form(key):
        for answer in group[:_MOST_SHOWN]:
            is_same = answer.text.split() == first.text.split()
            label = f"{names[answer.item_id]}: {'in the same words' if is_same else 'differs where it is highlighted'}"
            st.checkbox(escape_markdown(label), is_same or all_ticked, key=f"{key} {answer.item_id}")
            if not is_same:
                markup = Markup()
                markup.changes(first.passage, answer.passage)
                markup.draw()
        st.number_input(
            "Points for those that are ticked",
            *map(float, (criterion.minimum, criterion.points, first.points or 0, criterion.step)),
            format="%g",
            key=f"{key} points",
        )
        reasons = dict.fromkeys(decisions[0].reason for decisions in decided_together(standing, criterion.id))
        st.selectbox("Reason", [*(reasons | {TOGETHER_REASON: None})], key=f"{key} reason", accept_new_options=True)
        action_button(
            "Decide on those that are ticked", partial(_act, decide, "Decided.", names), form=True, type="primary"
        )


def _act(act: Callable[[], list[str]], message: str, names: Mapping[str, str]) -> None:
    """Run an action and report the result.

    Submissions on which somebody else has decided are not changed, and are named.
    """
    left = join_with_and([names[id] for id in act()])
    st.session_state["said of group"] = message + (
        f" Not changed, because somebody else has decided on them: {left}." if left else ""
    )


def _show_decisions(
    folder: Path, criterion_id: str, names: Mapping[str, str], standing: Mapping[str, Overrides]
) -> None:
    """Show the decisions on this criterion, with a button to undo all that were made at once."""
    for decisions in decided_together(standing, criterion_id)[:_MOST_SHOWN]:
        last, points = decisions[0], show_points(decisions[0].points) or "points unchanged"
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(
                escape_markdown(
                    f"{plural(len(decisions), 'answer')}, by "
                    f"{shorten_names([names.get(each.item_id, each.item_id[:8]) for each in decisions], 2)}: "
                    f"{points} — {last.reason}; decided by {last.reviewer}"
                )
            )
            undo = partial(
                _act,
                partial(undo_together, folder, decisions, standing, decider()),
                "What stood before stands again.",
                names,
            )
            action_button("Undo", undo, key=f"undo {criterion_id} {last.item_id} {last.time}")

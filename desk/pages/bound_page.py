"""How far the grades can be trusted: a sample that is graded by hand, blind, and the bound that follows from it.

Until the whole sample is graded, the page shows nothing from the model: no points, no evidence, no feedback.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from desk import assignments
from desk.pages.address import write_address
from desk.pages.markup import Markup
from desk.pages.name import ask_name
from desk.pages.shared import (
    Desk,
    action_button,
    decider,
    draw_live,
    point_buttons,
    show_errors,
    show_problem,
    show_table,
    wait_for,
)
from desk.pages.work import BLOCKS, char_count, draw_work, is_cut
from desk.text import escape_markdown
from desk.view import BatchView
from grading import hand_sample as bounds
from grading.error_bound import SIZES, percent, percent_without_error, plural_points
from grading.hand_sample import SHEET, Bound, Draw, SamplePlan, SheetConflict
from grading.jobs import Item
from grading.report.grades import GradedClass, load_graded, show_points
from grading.rubric.rubric import Criterion, exact, plain
from messages.errors import KvasirError
from producers.words import join_with_and, plural

_GRADING = "The class is still being graded: a sample is drawn from grades that stand."
_Sheet = Mapping[str, Mapping[str, str]]  # the sheet's cells, by item id and criterion id


def show_bound_page(desk: Desk, folder: Path) -> None:
    """Draw the page. A click inside it redraws only this part, not the page around it."""

    def bound() -> None:
        with show_errors():
            _bound(desk, folder)
        write_address()

    draw_live(bound)


def _bound(desk: Desk, folder: Path) -> None:
    view = desk.view(folder)
    show_problem(view)
    counts = view.counts()
    if not counts.total:
        st.caption("Nothing is graded yet.")
        return
    work = assignments.grading_work(folder)
    # The page also waits for a run with another rubric, because the grades of that run will make the sample outdated.
    if work.is_alive:
        wait_for(work, _GRADING)
        return
    if counts.open:
        st.info(_GRADING)
        return
    graded_class = load_graded(folder)
    draw = bounds.load_draw(folder) if bounds.is_drawn(folder) else None
    stale_grades = bounds.changed_submissions(draw, graded_class) if draw else []
    if stale_grades:
        count_text = plural(len(stale_grades), "grade")
        st.warning(
            escape_markdown(
                f"{count_text} changed since the sample was drawn, say by a regrade: it says nothing of them any more. "
                "Draw again; what was entered is kept in the folder."
            )
        )
    if draw is None or stale_grades:
        ask_name()  # the record of the draw contains this name
        _draw(folder, graded_class)
        return
    sheet = bounds.entered_points(folder / SHEET, draw, graded_class)
    open_ids = [id for id, cells in sheet.items() if not all(cells.values())]
    if not open_ids and st.session_state.get("bound shown") == (str(folder), draw.at, draw.looks):
        _answer(folder)
    else:
        _by_hand(desk, folder, view, draw, graded_class, sheet, open_ids)


# --- the draw


def _draw(folder: Path, graded_class: GradedClass) -> None:
    eligible_grades = bounds.undecided_members(folder, graded_class, SamplePlan().signal)
    st.markdown(
        "Grade some by hand, without seeing what the model gave. From them follows how many of the grades that nobody "
        "looks at differ from yours, at most."
    )
    with show_errors():
        st.caption(
            f"No error in {SIZES[1]} still allows {percent_without_error(SIZES[1])} of a large class, in {SIZES[0]} "
            f"{percent_without_error(SIZES[0])}."
        )
    decided_count = sum(grade.state == "graded" for grade in graded_class.grades) - len(eligible_grades)
    caption = f"{plural(len(eligible_grades), 'grade')} can be drawn."
    if decided_count:
        caption += f" {plural(decided_count, 'other')} a person has decided on already: nothing is promised of those."
    st.caption(caption)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        size = st.selectbox(
            "Graded by hand",
            SIZES,
            1,
            help="How many submissions you grade by hand. If the class has parts, you grade this many in each part.",
            key="plan size",
        )
        st.number_input("Points by which a grade may differ", 0.0, None, 1.0, 0.5, format="%g", key="plan within")
        st.number_input("Percent that may differ by more", 0.5, 99.0, 20.0, 5.0, format="%g", key="plan most")
        st.number_input("Confidence, in percent", 50.0, 99.9, 90.0, 5.0, format="%g", key="plan confidence")
    if 0 < len(eligible_grades) <= int(size):
        st.caption(
            f"{size} would be all {len(eligible_grades)} of them: then nothing stays unseen, and nothing is promised."
        )
    upload: Any = st.file_uploader(
        "Parts with a sample and a bound of their own (optional): a CSV with submission and part",
        ["csv"],
        key="plan parts",
    )
    strata = None
    with show_errors():
        if upload:
            strata = _strata(upload)
            parts = [f"{name or 'no part'} ({size})" for name, size in sorted(Counter(strata.values()).items())]
            st.caption(escape_markdown(f"Read: {join_with_and(parts)}."))
    st.caption("All of this is written down before anybody grades, and isn't changed after.")
    is_unclear = not eligible_grades or (bool(upload) and not strata)

    def draw_now() -> None:
        """Draw a sample by the plan in the fields."""
        state = st.session_state
        size, within, percent_over, confidence, upload = (
            state[f"plan {name}"] for name in ("size", "within", "most", "confidence", "parts")
        )
        plan = SamplePlan((int(size),), plain(exact(within)), percent_over / 100, confidence / 100)
        bounds.draw_sample(folder, plan, decider(), _strata(upload) if upload else None)
        state.pop("drawn", None)

    action_button("Draw", draw_now, type="primary", disabled=is_unclear)


def _strata(upload: Any) -> dict[str, str]:
    return bounds.strata_from(upload.getvalue(), f"file {upload.name}")


# --- by hand


def _by_hand(
    desk: Desk,
    folder: Path,
    view: BatchView,
    draw: Draw,
    graded_class: GradedClass,
    sheet: _Sheet,
    open_ids: Sequence[str],
) -> None:
    _draw_summary(folder, draw, graded_class, sheet)
    item_id = _pick(draw, graded_class, sheet, open_ids)
    if not open_ids:
        st.success("All are graded by hand.")
        shown = {"bound shown": (str(folder), draw.at, draw.looks)}
        st.button("Show what they say", type="primary", on_click=st.session_state.update, args=(shown,))
    if view.assignment is None or view.rubric is None:
        return
    item = next((item for item in view.assignment.items if item.item_id == item_id), None)
    if item is None:
        st.error("This submission is no longer among the work; put its file back.")
        return
    with st.container(key="beside"):
        work, points = st.columns(2)
    with work:
        _show_work(desk, view, item)
    with points, st.container(key="form"):
        _points(folder, view.rubric.criteria, item, sheet[item_id])


def _show_work(desk: Desk, view: BatchView, item: Item) -> None:
    """Show the work, without marking what the model quoted."""
    submission = item.submission
    if submission.problem:
        st.error(escape_markdown(submission.problem))
    is_whole = is_cut(submission) and st.toggle(
        f"Show all {char_count(submission):,} characters", key=f"all {item.item_id}"
    )
    assert view.assignment
    folder = view.assignment.request.folder
    key, stamp = ("work by hand", view.folder, item.item_id), (submission, is_whole)
    blocks = desk.get_or_make(key, stamp, lambda: draw_work(folder, submission, {}, is_whole))
    BLOCKS(key=f"work of {item.item_id}", data={"blocks": blocks})


def _draw_summary(folder: Path, draw: Draw, graded_class: GradedClass, sheet: _Sheet) -> None:
    """Show what is to be promised, and whether that is possible."""
    plan, members = draw.plan, sum(len(stratum.members) for stratum in draw.strata)
    st.markdown(
        escape_markdown(
            f"{draw.by} drew {len(sheet)} of {plural(members, 'grade')}. To be promised, with {plan.confidence:.0%} "
            f"confidence: at most {percent(plan.at_most)} of the grades that nobody looks at differ from yours by more "
            f"than {plural_points(plan.tolerance)}."
        )
    )
    with show_errors():
        for stratum in draw.strata:
            st.caption(escape_markdown(bounds.prospect(draw, stratum)))
    member_ids = {member.item_id for stratum in draw.strata for member in stratum.members}
    new_grades = [
        grade
        for grade in bounds.undecided_members(folder, graded_class, plan.signal)
        if grade.item_id not in member_ids
    ]
    if new_grades:
        st.caption(f"{plural(len(new_grades), 'grade')} came after the draw: nothing will be promised of those.")
    if not any(any(cells.values()) for cells in sheet.values()):
        with st.expander("Draw another number"):
            _draw(folder, graded_class)


def _pick(draw: Draw, graded_class: GradedClass, sheet: _Sheet, open_ids: Sequence[str]) -> str:
    """Choose the submission to grade by hand, with buttons for the others in the order drawn."""
    state, names = st.session_state, draw.sampled_members()
    ids = [id for id in names if id in sheet]
    if state.get("drawn") not in sheet:
        state["drawn"] = (open_ids or ids)[0]
    item_id: str = state["drawn"]
    at = ids.index(item_id)

    people = {grade.id: grade.display_name for grade in graded_class.grades}

    def name(id: str) -> str:
        return f"{'' if id in open_ids else '✓ '}{people.get(id, names[id].submission)}"

    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button("Previous", disabled=not at, on_click=_go, args=(ids[at - 1],), shortcut="K")
        st.selectbox("Submission", ids, format_func=name, key="drawn")
        next_ids = ids[at + 1 :]
        st.button("Next", disabled=not next_ids, on_click=_go, args=tuple(next_ids[:1]), shortcut="J")
        ask_name()
    markup = Markup()
    markup.caption(f"{len(ids) - len(open_ids)} of {len(ids)} graded by hand. Each entry is saved at once, in {SHEET}.")
    markup.draw()
    return item_id


def _go(item_id: str) -> None:
    st.session_state.update({"drawn": item_id, "hand criterion": None})


def _points(folder: Path, criteria: Sequence[Criterion], item: Item, cells: Mapping[str, str]) -> None:
    """Show a field for each criterion, and buttons if there are few points.

    Each entry is written to the sheet at once.
    """
    state = st.session_state
    problem, conflict = state.pop("hand said", ""), state.get("hand conflict")
    drawn_criteria = [criterion for criterion in criteria if criterion.id in cells]
    ids = [criterion.id for criterion in drawn_criteria]
    if state.get("hand criterion") not in [*ids, "done"]:
        state["hand criterion"] = next((id for id in ids if not cells[id]), "done")
    for criterion, next_id in zip(drawn_criteria, [*ids[1:], "done"], strict=True):
        field = f"hand {item.item_id} {criterion.id}"
        # The field shows the sheet's value, unless a value was just typed and refused. In that case, the typed value
        # stays visible.
        if state.get("hand seen", {}).get(field) != cells[criterion.id] or field not in state:
            state.setdefault("hand seen", {})[field] = cells[criterion.id]
            state[field] = float(cells[criterion.id].replace(",", ".")) if cells[criterion.id] else None
        is_current = state["hand criterion"] == criterion.id
        head = Markup()
        head.title(f"▸ {criterion.title}" if is_current else criterion.title)
        head.caption(f"{criterion.id}: {show_points(criterion.minimum)} to {show_points(criterion.points)}")
        if criterion.guidance:
            head.caption(criterion.guidance)
        head.draw()
        args = (folder, item.item_id, criterion.id, next_id)
        bounds = criterion.minimum, criterion.points
        point_buttons(criterion.id, *bounds, criterion.step, field, is_current, _press, (field, args))
        st.number_input(
            f"Points for {criterion.id}",
            *map(float, bounds),
            None,
            float(criterion.step),
            format="%g",
            key=field,
            on_change=_enter_points,
            args=args,
        )
        if conflict and conflict[:3] == (str(folder), item.item_id, criterion.id):
            _which_counts(conflict, args)
    if problem:
        st.error(escape_markdown(problem))


def _press(points: float, field: str, args: tuple[Path, str, str, str]) -> None:
    st.session_state[field] = points
    _enter_points(*args)


def _enter_points(folder: Path, item_id: str, criterion: str, next_id: str) -> None:
    """Write a field's value into the sheet. If somebody else has changed the cell in the meantime, ask."""
    state, field = st.session_state, f"hand {item_id} {criterion}"
    entered_points = state.get(field)
    points, sheet_values = "" if entered_points is None else str(plain(exact(entered_points))), state["hand seen"]
    try:
        bounds.enter_points(folder, item_id, criterion, points, sheet_values.get(field, ""))
        sheet_values[field] = points
        state.update({"hand criterion": next_id, "hand conflict": None})
    except SheetConflict as error:
        state["hand conflict"] = str(folder), item_id, criterion, points, error.stands
    except KvasirError as error:
        state["hand said"] = str(error)
        sheet_values.pop(field, None)


def _which_counts(conflict: tuple[str, str, str, str, str], args: tuple[Path, str, str, str]) -> None:
    _, item_id, criterion, own_points, stored_points = conflict
    state, field = st.session_state, f"hand {item_id} {criterion}"
    message = (
        f"Somebody has entered {stored_points or 'nothing'} here since you looked; yours is {own_points or 'nothing'}."
    )
    st.warning(escape_markdown(message))

    def settle(points: str) -> None:
        state["hand seen"][field] = stored_points
        state[field] = float(points) if points else None
        _enter_points(*args)

    with st.container(horizontal=True):
        st.button("Mine replaces it", type="primary", on_click=settle, args=(own_points,))
        st.button("Keep theirs", on_click=settle, args=(stored_points,))


# --- the answer


def _answer(folder: Path) -> None:
    bound = None
    with show_errors():
        bound = bounds.bound_of(folder)
        _show_bound(bound)
    st.button(
        "Back to the hand grades",
        on_click=st.session_state.update,
        args=({"bound shown": None},),
        help="You have seen the agreement now, so correct only typing mistakes in the hand grades.",
    )
    if bound and bound.draw.looks < len(bound.draw.plan.sizes):
        action_button("The next look that was planned", lambda: bounds.draw_more(folder))


def _show_bound(bound: Bound) -> None:
    for warning in bound.warnings:
        st.warning(escape_markdown(warning))
    for part in bound.parts:
        sentence, *rest = bounds.words_of(bound, part)
        (st.success if part.choice else st.info)(escape_markdown(sentence))
        for caption in rest:
            st.caption(escape_markdown(caption))
    st.caption(bounds.words(bound)[-1])
    for part in bound.parts:
        heading = f"Agreement: {part.name or plural(part.drawn, 'grade')}"
        st.subheader(escape_markdown(heading), anchor=False)
        show_table([bounds.agreement_row(criterion_agreement) for criterion_agreement in part.agreement], heading)
    st.caption(
        "same: both gave the same points. kappa: Cohen's, with quadratic weights; 1 is full agreement. bias: yours "
        f"minus the model's, in points, with its {bound.draw.plan.confidence:.0%} interval. largest: the largest "
        "difference."
    )

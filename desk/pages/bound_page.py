"""How far the grades may be trusted: a sample graded by hand, blind, and what it promises of the rest.

Until all of the sample is graded, nothing that a model gave is on the page: no points, no evidence, no feedback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from desk import assignments
from desk.pages import review_page
from desk.pages.address import keep
from desk.pages.markup import Markup
from desk.pages.shared import Desk, act, decider, live, say_problem, sentences, table, wait_for
from desk.text import escaped
from desk.view import BatchView
from grading import hand_sample as bounds
from grading.error_bound import SIZES, allowed, percent, plural_points
from grading.grade import Item
from grading.hand_sample import SHEET, Bound, BoundError, Draw, Plan, SheetConflict
from grading.report.graded import GradedClass, load_graded
from grading.report.grades import show_points
from grading.rubric.rubric import Criterion, exact, plain
from messages.errors import KvasirError
from producers.words import listed, plural

_MOST_BUTTONS = 9  # points of a criterion: as many as there are keys
_KEYS = {
    "j, k": "the next, or the previous, submission",
    "0 to 9": "so many points for the criterion marked ▸, which then moves on to the next",
    "?": "this list",
}
_GRADING = "The class is still being graded: a sample is drawn from grades that stand."
_Given = Mapping[str, Mapping[str, str]]  # what the sheet holds, by item id and criterion


def show(desk: Desk, folder: Path) -> None:
    """Draw it; a click on it draws it alone, without the page around it."""

    def bound() -> None:
        with sentences():
            _bound(desk, folder)
        keep()

    live(bound, None)


def _bound(desk: Desk, folder: Path) -> None:
    view = desk.views.of(folder)
    say_problem(view)
    counts = view.counts()
    if not counts.total:
        st.caption("Nothing is graded yet.")
        return
    work = assignments.grading(folder)
    if work.alive:  # also with another rubric for all: what the sample says is about to be wrong
        wait_for(work, _GRADING)
        return
    if counts.open:
        st.info(_GRADING)
        return
    graded = load_graded(folder)
    if not bounds.is_drawn(folder):
        review_page.ask_name()  # it stands in the record of the draw
        _draw(folder, graded)
        return
    made = bounds.drawn(folder)
    gone = bounds.changed(made, graded)
    if gone:
        were = plural(len(gone), "grade")
        st.warning(
            escaped(
                f"{were} changed since the sample was drawn, say by a regrade: it says nothing of them any more. Draw "
                "again; what was entered is kept in the folder."
            )
        )
        review_page.ask_name()
        _draw(folder, graded)
        return
    given = bounds.given(folder, made, graded)
    left = [id for id, cells in given.items() if not all(cells.values())]
    if not left and st.session_state.get("bound shown") == (str(folder), made.at, made.looks):
        _answer(folder)
    else:
        _by_hand(desk, folder, view, made, graded, given, left)


# --- the draw


def _draw(folder: Path, graded: GradedClass) -> None:
    able = bounds.undecided(folder, graded, Plan().signal)
    st.markdown(
        "Grade some by hand, without seeing what the model gave. From them follows how many of the grades that nobody "
        "looks at differ from yours, at most."
    )
    with sentences():
        st.caption(
            f"No error in {SIZES[1]} still allows {allowed(SIZES[1])} of a large class, in {SIZES[0]} "
            f"{allowed(SIZES[0])}."
        )
    decided = sum(grade.state == "graded" for grade in graded.grades) - len(able)
    said = f"{plural(len(able), 'grade')} can be drawn."
    if decided:
        said += f" {plural(decided, 'other')} a person has decided on already: nothing is promised of those."
    st.caption(said)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        size = st.selectbox("Graded by hand", SIZES, 1, help="With parts: of each part.", key="plan size")
        st.number_input("Points by which a grade may differ", 0.0, None, 1.0, 0.5, format="%g", key="plan within")
        st.number_input("Percent that may differ by more", 0.5, 99.0, 20.0, 5.0, format="%g", key="plan most")
        st.number_input("Confidence, in percent", 50.0, 99.9, 90.0, 5.0, format="%g", key="plan confidence")
    if 0 < len(able) <= int(size):
        st.caption(f"{size} would be all {len(able)} of them: then nothing stays unseen, and nothing is promised.")
    upload: Any = st.file_uploader(
        "Parts with a sample and a bound of their own (optional): a CSV with submission and part",
        ["csv"],
        key="plan parts",
    )
    strata = None
    with sentences():
        if upload:
            strata = _strata(upload)
            parts = [f"{name or 'no part'} ({size})" for name, size in sorted(Counter(strata.values()).items())]
            st.caption(escaped(f"Read: {listed(parts)}."))
    st.caption("All of this is written down before anybody grades, and isn't changed after.")
    unclear = not able or (bool(upload) and not strata)
    act("Draw", lambda: _draw_now(folder), type="primary", disabled=unclear)


def _draw_now(folder: Path) -> None:
    """By the plan that the fields say."""
    state = st.session_state
    size, within, most, confidence, upload = (
        state[f"plan {name}"] for name in ("size", "within", "most", "confidence", "parts")
    )
    plan = Plan((int(size),), plain(exact(within)), most / 100, confidence / 100)
    bounds.draw(folder, plan, decider(), _strata(upload) if upload else None)
    state.pop("drawn", None)


def _strata(upload: Any) -> dict[str, str]:
    return bounds.strata_from(upload.getvalue(), f"file {upload.name}")


# --- by hand


def _by_hand(
    desk: Desk,
    folder: Path,
    view: BatchView,
    made: Draw,
    graded: GradedClass,
    given: _Given,
    left: Sequence[str],
) -> None:
    _planned(folder, made, graded, given)
    here = _pick(made, given, left)
    if not left:
        _ready(folder, made)
    if view.assignment is None or view.rubric is None:
        return
    item = next((item for item in view.assignment.items if item.item_id == here), None)
    if item is None:
        st.error("This submission is no longer among the work; put its file back.")
        return
    with st.container(key="beside"):
        work, points = st.columns(2)
    with work:
        review_page.show_work(desk, view, item, {})
    with points, st.container(key="form"):
        _points(folder, view.rubric.criteria, item, given[here])


def _planned(folder: Path, made: Draw, graded: GradedClass, given: _Given) -> None:
    """What is to be promised, and whether it can be."""
    plan, members = made.plan, sum(len(stratum.members) for stratum in made.strata)
    st.markdown(
        escaped(
            f"{made.by} drew {len(given)} of {plural(members, 'grade')}. To be promised, with {plan.confidence:.0%} "
            f"confidence: at most {percent(plan.at_most)} of the grades that nobody looks at differ from yours by more "
            f"than {plural_points(plan.tolerance)}."
        )
    )
    with sentences():
        for stratum in made.strata:
            st.caption(escaped(bounds.prospect(made, stratum)))
    known = {one.item_id for stratum in made.strata for one in stratum.members}
    new = [one for one in bounds.undecided(folder, graded, plan.signal) if one.item_id not in known]
    if new:
        st.caption(f"{plural(len(new), 'grade')} came after the draw: nothing will be promised of those.")
    if not any(any(cells.values()) for cells in given.values()):
        with st.expander("Draw another number"):
            _draw(folder, graded)


def _pick(made: Draw, given: _Given, left: Sequence[str]) -> str:
    """The submission that is graded by hand, and ways to the others, in the order drawn."""
    state, ids, names = st.session_state, [*given], made.sampled()
    ids = [id for id in names if id in given]
    if state.get("drawn") not in given:
        state["drawn"] = (left or ids)[0]
    here: str = state["drawn"]
    at = ids.index(here)

    def name(id: str) -> str:
        return f"{'' if id in left else '✓ '}{names[id].submission}"

    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button("Previous", disabled=not at, on_click=_go, args=(ids[at - 1],), shortcut="K")
        st.selectbox("Submission", ids, format_func=name, key="drawn")
        after = ids[at + 1 :]
        st.button("Next", disabled=not after, on_click=_go, args=tuple(after[:1]), shortcut="J")
        review_page.ask_name()
    said = Markup()
    said.caption(f"{len(ids) - len(left)} of {len(ids)} graded by hand. Each entry is saved at once, in {SHEET}.")
    said.keys(_KEYS)
    said.draw()
    return here


def _go(item_id: str) -> None:
    st.session_state.update({"drawn": item_id, "hand criterion": None})


def _ready(folder: Path, made: Draw) -> None:
    st.success("All are graded by hand.")
    shown = {"bound shown": (str(folder), made.at, made.looks)}
    st.button("Show what they say", type="primary", on_click=st.session_state.update, args=(shown,))


def _points(folder: Path, criteria: Sequence[Criterion], item: Item, cells: Mapping[str, str]) -> None:
    """A field for each criterion, and buttons where there are few points: each entry goes to the sheet at once."""
    state = st.session_state
    said, conflict = state.pop("hand said", ""), state.get("hand conflict")
    ids = [one.id for one in criteria if one.id in cells]
    if state.get("hand criterion") not in [*ids, "done"]:
        state["hand criterion"] = next((id for id in ids if not cells[id]), "done")
    for one, after in zip([one for one in criteria if one.id in cells], [*ids[1:], "done"], strict=True):
        field = f"hand {item.item_id} {one.id}"
        # What the sheet says counts, unless this is what was just typed and not accepted.
        if state.get("hand seen", {}).get(field) != cells[one.id] or field not in state:
            state.setdefault("hand seen", {})[field] = cells[one.id]
            state[field] = float(cells[one.id].replace(",", ".")) if cells[one.id] else None
        here = state["hand criterion"] == one.id
        head = Markup()
        head.title(f"▸ {one.title}" if here else one.title)
        head.caption(f"{one.id}: 0 to {show_points(one.points)}")
        if one.guidance:
            head.caption(one.guidance)
        head.draw()
        args = (folder, item.item_id, one.id, after)
        if one.points <= _MOST_BUTTONS and one.step <= 1:
            _buttons(field, one, args, here)
        st.number_input(
            f"Points for {one.id}",
            0.0,
            float(one.points),
            None,
            float(one.step),
            format="%g",
            key=field,
            on_change=_give,
            args=args,
        )
        if conflict and conflict[:3] == (str(folder), item.item_id, one.id):
            _which_counts(conflict, args)
    if said:
        st.error(escaped(said))


def _buttons(field: str, one: Criterion, args: tuple[Path, str, str, str], here: bool) -> None:
    entered = st.session_state[field]
    with st.container(horizontal=True, gap="small", key="points-at-hand" if here else None):
        for points in range(int(one.points) + 1):
            st.button(
                str(points),
                key=f"hand {points} {one.id}",
                type="primary" if entered == points else "secondary",
                on_click=_press,
                args=(points, field, args),
            )


def _press(points: int, field: str, args: tuple[Path, str, str, str]) -> None:
    st.session_state[field] = float(points)
    _give(*args)


def _give(folder: Path, item_id: str, criterion: str, after: str) -> None:
    """Write what the field says into the sheet; where somebody has entered something else meanwhile, ask."""
    state, field = st.session_state, f"hand {item_id} {criterion}"
    entered = state.get(field)
    points, seen = "" if entered is None else str(plain(exact(entered))), state["hand seen"]
    try:
        bounds.give(folder, item_id, criterion, points, seen.get(field, ""))
        seen[field] = points
        state.update({"hand criterion": after, "hand conflict": None})
    except SheetConflict as error:
        state["hand conflict"] = str(folder), item_id, criterion, points, error.stands
    except KvasirError as error:
        state["hand said"] = str(error)
        seen.pop(field, None)


def _which_counts(conflict: tuple[str, str, str, str, str], args: tuple[Path, str, str, str]) -> None:
    _, item_id, criterion, mine, theirs = conflict
    state, field = st.session_state, f"hand {item_id} {criterion}"
    said = f"Somebody has entered {theirs or 'nothing'} here since you looked; yours is {mine or 'nothing'}."
    st.warning(escaped(said))

    def settle(points: str) -> None:
        state["hand seen"][field] = theirs
        state[field] = float(points) if points else None
        _give(*args)

    with st.container(horizontal=True):
        st.button("Mine replaces it", type="primary", on_click=settle, args=(mine,))
        st.button("Keep theirs", on_click=settle, args=(theirs,))


# --- the answer


def _answer(folder: Path) -> None:
    try:
        found = bounds.bound_of(folder)
    except BoundError as error:
        st.error(escaped(str(error)))
        found = None
    if found:
        _said(found)
    back = {"bound shown": None}
    st.button(
        "Back to the hand grades",
        on_click=st.session_state.update,
        args=(back,),
        help="You know the agreement by now: mend slips of the pen, and nothing else.",
    )
    if found and found.drawn.looks < len(found.drawn.plan.sizes):
        act("The next look that was planned", lambda: bounds.more(folder))


def _said(found: Bound) -> None:
    for warning in found.warnings:
        st.warning(escaped(warning))
    for part in found.parts:
        sentence, *rest = bounds.words_of(found, part)
        (st.success if part.choice else st.info)(escaped(sentence))
        for said in rest:
            st.caption(escaped(said))
    st.caption(bounds.words(found)[-1])
    for part in found.parts:
        about = f"Agreement: {part.name or plural(part.drawn, 'grade')}"
        st.subheader(escaped(about), anchor=False)
        table([bounds.agreement_row(one) for one in part.agreement], about)
    st.caption(
        "same: both gave the same points. kappa: Cohen's, with quadratic weights; 1 is full agreement. bias: yours "
        f"minus the model's, in points, with its {found.drawn.plan.confidence:.0%} interval. largest: the largest "
        "difference."
    )

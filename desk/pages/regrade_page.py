"""Another rubric: edited, tried on some or all, compared, adopted."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from desk import assignments
from desk.agreement import Difference, difference_row, differences
from desk.decisions import TAKEN_OVER, taken_over
from desk.pages import review_page, rubric_form
from desk.pages.rubric_form import RubricDraft
from desk.pages.shared import REFRESH_S, Desk, act, decider, live, say_problem, sentences, table, text, wait_for
from desk.rounds import adopt_round, changes, go_on_with, rounds, start_round, versions
from desk.text import escaped
from desk.view import BatchView
from grading.points import Grade
from grading.prompts.prompt import prefix
from grading.prompts.questions import questions_of
from grading.report.graded import load_graded
from grading.report.grades import outcome_of
from grading.rubric.form import touched
from grading.rubric.rubric import KINDS, ROLES
from messages.errors import RubricError
from producers.files.private import read_ordinary
from producers.words import listed, plural


def show(desk: Desk, folder: Path) -> None:
    """Draw it."""
    view = desk.views.of(folder)
    say_problem(view)
    if assignments.grading(folder).alive:
        wait_for(assignments.grading(folder), "The class is being graded …")
    with sentences():
        chosen, draft = _editor(desk, folder, view)
        _prompts(view, draft)
        _start(desk, folder, view, chosen, draft)
    for place in reversed(rounds(folder)):
        _round(desk, folder, view, place)
    for place in reversed(versions(folder)):
        with sentences():
            _version(view, place)


# --- the rubric


def _editor(desk: Desk, folder: Path, view: BatchView) -> tuple[Path, RubricDraft]:
    """The version that is chosen, as it is edited; what is edited becomes a version of its own when it is saved."""
    st.subheader("Rubric and instructions", anchor=False)
    inputs = assignments.read_inputs(folder)
    now = Path(inputs.rubric or folder / "rubrics" / "none.yaml")
    kept = list(dict.fromkeys([now, *assignments.rubric_versions(folder)]))
    saved = st.session_state.pop("saved rubric", None)
    if saved in kept:
        st.session_state["rubric version"] = saved
    with st.container(horizontal=True, vertical_alignment="bottom"):
        label = {"format_func": lambda path: _label(folder, path, now), "key": "rubric version"}
        chosen = st.selectbox("Version", kept, **label) or now
        review_page.ask_name()  # it stands in the record of changes; and the browser is known again after a reload
    key = (st.session_state["browser"], chosen)
    draft = desk.rubrics.get(key)
    if draft is None:
        new = RubricDraft.of(chosen.name, _read(chosen)) if inputs.rubric else RubricDraft.begin(inputs.title)
        draft = desk.rubrics[key] = new
    rubric_form.edit(draft, changes(folder))
    _against(view, draft)

    def save() -> None:
        rubric_form.take_in(draft)
        name, said = draft.file
        _kept(folder, assignments.save_rubric(folder, name, said.encode()))
        desk.rubrics.pop(key, None)  # a double click saves twice

    buttons = st.container(horizontal=True)
    act("Save as a new version", save, at=buttons, disabled=not draft.unsaved, type="primary")
    if draft.unsaved and buttons.button("Discard what is not saved"):
        del desk.rubrics[key]
        st.rerun()
    with st.expander("Upload a version"):
        replacement = st.file_uploader("Rubric", [*KINDS])
        if replacement:
            name, data = replacement.name, replacement.getvalue()
            act("Keep the uploaded one", lambda: _kept(folder, assignments.save_rubric(folder, name, data)))
    return chosen, draft


def _kept(folder: Path, rubric: Path) -> None:
    """Show this version; an assignment's first is the one that it is graded with."""
    st.session_state["saved rubric"] = rubric
    if not assignments.read_inputs(folder).rubric:
        assignments.use_rubric(folder, rubric)


def _against(view: BatchView, draft: RubricDraft) -> None:
    """What is edited, and what asking about it would cost; why it is no rubric yet."""
    try:
        rubric = draft.rubric()
    except RubricError as error:
        if not draft.problem:
            st.error(escaped(str(error)))
        return
    if draft.unsaved:
        st.info("What is edited is not saved yet.")
    if view.rubric and view.assignment:
        if rubric.digest == view.rubric.digest:
            same = "The class is graded with this rubric"
            st.caption(f"{same}; only the rule on lateness differs." if rubric.late != view.rubric.late else f"{same}.")
            return
        changed = touched(view.rubric, rubric)
        if changed:
            st.caption(escaped(f"Other than what the class is graded with: {listed(changed)}."))


def _read(path: Path) -> str:
    try:
        return read_ordinary(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RubricError(f"{path}: the rubric can't be read: {error}; upload it again") from None


def _prompts(view: BatchView, draft: RubricDraft) -> None:
    """What the class shares of each prompt, as this version makes it."""
    if not view.assignment or not st.toggle("Show the prompts that this version makes"):
        return
    rubric = draft.rubric()
    for role in ROLES:
        if rubric.for_model(role):
            st.caption(f"{role}: the part that the whole class shares; the student's work follows it")
            together = view.assignment.request.ask == "together"
            text(prefix(role, rubric, view.assignment.solution, view.assignment.template, with_criteria=together))
            for question in () if together else questions_of(role, rubric):
                text(question.text.strip())


def _label(folder: Path, path: Path, now: Path) -> str:
    name = assignments.version_name(folder, path)
    return f"{name}, in use" if path == now else name


# --- a new round


def _start(desk: Desk, folder: Path, view: BatchView, rubric: Path, draft: RubricDraft) -> None:
    used = assignments.read_inputs(folder).rubric
    if not used:
        st.info("This assignment has no rubric yet: save this one as its first version, and grade with it under Grade.")
        return
    st.subheader("Regrade", anchor=False)
    if not view.counts().total:
        st.caption("Nothing is graded yet, so nothing is compared: the class is graded with the version in use.")
        act(
            "Use this version",
            lambda: assignments.use_rubric(folder, rubric),
            type="primary",
            disabled=Path(used) == rubric or draft.unsaved,
        )
        return
    names = [grade.submission for grade in view.grades]
    wanted = [name for name in st.session_state.pop("regrade names", []) if name in names]
    if wanted:
        st.session_state["regrade which"] = wanted
    chosen = st.multiselect("Submissions (none: the whole class)", names, key="regrade which")
    if draft.unsaved:
        st.caption("Save what is edited as a new version first: a round is graded with a version that is kept.")
    elif view.assignment:
        st.caption(escaped(desk.cost(folder, draft.rubric(), chosen)))

    def regrade() -> None:
        start_round(desk.backend, folder, desk.views.of(folder), rubric, st.session_state["regrade which"])

    act("Regrade beside the present grades", regrade, type="primary", disabled=draft.unsaved)


def _round(desk: Desk, folder: Path, view: BatchView, place: Path) -> None:
    work = assignments.grading(place)
    running = work.alive

    def show_round() -> None:
        if running and not work.alive:
            st.rerun()
        with sentences():
            _one_round(desk, folder, view, place, running)

    with st.container(border=True):
        rubric = assignments.version_name(folder, Path(assignments.read_inputs(place).rubric))
        st.markdown(f"**Round {escaped(place.name)}** with the rubric's {escaped(rubric)}")
        live(show_round, REFRESH_S if running else None)


def _one_round(desk: Desk, folder: Path, view: BatchView, place: Path, running: bool) -> None:
    tried = desk.views.of(place)
    counts, work = tried.counts(), assignments.grading(place)
    if tried.problem:
        st.error(escaped(tried.problem))
    if running:
        jobs = f"{counts.done} of {plural(counts.total, 'job')}"
        st.caption(jobs if counts.total else work.last_words() or "starting …")
    elif counts.open or not counts.total:
        left = (
            f"{plural(counts.open, 'job', 'has', 'have')} no result yet."
            if counts.total
            else "It ended before it began."
        )
        st.warning(escaped(f"{left} {work.last_words()}".strip()))
        key = f"go on {place}"
        act("Go on with this round", lambda: go_on_with(desk.backend, folder, desk.views.of(folder), place), key)
    if not counts.total:
        return
    before = {grade.submission: grade for grade in view.grades}
    _show_differences(differences(before, [grade for grade in tried.grades if outcome_of(grade) != "waiting"]))
    if counts.open or running:  # a click on what is about to be drawn anew would be lost
        return
    left, right, _ = st.columns([2, 2, 4])

    def take_over() -> None:
        _take_over(desk, folder, before, tried.grades, place)

    def adopt() -> None:
        adopt_round(desk.backend, folder, desk.views.of(folder), place, tried.results, decider())

    act("Take over these points", take_over, f"take {place}", left, help="As reviews. What a person has decided stays.")
    act("Use this rubric for the class", adopt, f"adopt {place}", right)


def _take_over(desk: Desk, folder: Path, before: dict[str, Grade], after: list[Grade], place: Path) -> None:
    decisions = desk.decisions(folder)
    decided = decisions.refresh()
    for grade in after:
        old = before.get(grade.submission)
        if old:
            stands = decided.get(old.item_id, {})
            decisions.add(*taken_over(old, grade, f"{TAKEN_OVER} {place.name}", decider(), stands))


def _version(view: BatchView, place: Path) -> None:
    with st.expander(escaped(f"Before the rubric changed: version {place.name.partition('-')[0]}")):
        old = {grade.submission: grade for grade in load_graded(place).grades}
        _show_differences(differences(old, view.grades))


def _show_differences(found: list[Difference]) -> None:
    changed = [difference for difference in found if not difference.is_none]
    if found:
        st.caption(f"{len(changed)} of {len(found)} are different.")
    if changed:
        table([difference_row(difference) for difference in changed], "Grades that are different")

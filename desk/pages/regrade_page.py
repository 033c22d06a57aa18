"""The page for another rubric: it is edited, tried on some or all submissions, compared, and adopted."""

from pathlib import Path

import streamlit as st

from desk import assignments
from desk.decisions import round_overrides
from desk.differences import Difference, difference_row, differences
from desk.pages import rubric_form
from desk.pages.name import ask_name
from desk.pages.rubric_form import RubricDraft
from desk.pages.shared import (
    REFRESH_S,
    Desk,
    action_button,
    decider,
    draw_live,
    show_errors,
    show_problem,
    show_table,
    show_text,
    wait_for,
)
from desk.rounds import adopt_round, changes, continue_round, rounds, start_round, versions
from desk.text import escape_markdown
from desk.view import BatchView
from desk.work import Work
from grading.export.final import lapsing_approvals
from grading.prompts.prompt import prefix
from grading.prompts.questions import questions_of
from grading.report.grades import load_graded, outcome_of
from grading.reviews import ROUND_REASON, append_override
from grading.rubric.form import rubric_differences
from grading.rubric.rubric import ASPECTS, KINDS
from messages.errors import RubricError
from producers.storage.private import read_ordinary
from producers.words import join_with_and, plural


def show_regrade_page(desk: Desk, folder: Path) -> None:
    """Draw it."""
    view = desk.view(folder)
    show_problem(view)
    if assignments.grading_work(folder).is_alive:
        wait_for(assignments.grading_work(folder), "The class is being graded …")
    with show_errors():
        rubric_path, draft = _editor(desk, folder, view)
        _prompts(view, draft)
        _start(desk, folder, view, rubric_path, draft)
    for place in reversed(rounds(folder)):
        _round(desk, folder, view, place)
    for place in reversed(versions(folder)):
        with (
            show_errors(),
            st.expander(escape_markdown(f"Before the rubric changed: version {place.name.partition('-')[0]}")),
        ):
            old = {grade.submission: grade for grade in load_graded(place).grades}
            _show_differences(differences(old, view.grades), view)


# --- the rubric


def _editor(desk: Desk, folder: Path, view: BatchView) -> tuple[Path, RubricDraft]:
    """Show the chosen version in an editor. Saving the changes makes a new version."""
    st.subheader("Rubric and instructions", anchor=False)
    inputs = assignments.read_inputs(folder)
    current_path = Path(inputs.rubric or folder / "rubrics" / "none.yaml")
    paths = list(dict.fromkeys([current_path, *assignments.rubric_versions(folder)]))
    new_version = st.session_state.pop("saved rubric", None)
    if new_version in paths:
        st.session_state["rubric version"] = new_version
    with st.container(horizontal=True, vertical_alignment="bottom"):
        suffixes = {current_path: ", in use"}
        rubric_path = (
            st.selectbox(
                "Version",
                paths,
                format_func=lambda path: assignments.version_name(folder, path) + suffixes.get(path, ""),
                key="rubric version",
            )
            or current_path
        )
        # Ask for the person's name here, because it goes into the record of changes. The input field for the name also
        # saves the cookie that identifies this browser.
        ask_name()
    key = (st.session_state["browser"], rubric_path)
    draft = desk.rubrics.get(key)
    if draft is None:
        new = RubricDraft.of(rubric_path.name, _read(rubric_path)) if inputs.rubric else RubricDraft.begin(inputs.title)
        draft = desk.rubrics[key] = new
    rubric_form.edit(draft, changes(folder))
    _against(view, draft)

    def save() -> None:
        rubric_form.read_widgets(draft)
        name, content = draft.file
        _select_version(folder, assignments.save_rubric(folder, name, content.encode()))
        # On the second click of a double click, the draft has already been removed.
        desk.rubrics.pop(key, None)

    buttons = st.container(horizontal=True)
    action_button("Save as a new version", save, at=buttons, disabled=not draft.is_unsaved, type="primary")
    if draft.is_unsaved and buttons.button("Discard what is not saved"):
        del desk.rubrics[key]
        st.rerun()
    with st.expander("Upload a version"):
        replacement = st.file_uploader("Rubric", [*KINDS])
        if replacement:
            name, data = replacement.name, replacement.getvalue()
            action_button(
                "Keep the uploaded one", lambda: _select_version(folder, assignments.save_rubric(folder, name, data))
            )
    return rubric_path, draft


def _select_version(folder: Path, rubric: Path) -> None:
    """Show this version. By default it is the one with which the assignment is graded."""
    st.session_state["saved rubric"] = rubric
    if not assignments.read_inputs(folder).rubric:
        assignments.use_rubric(folder, rubric)


def _against(view: BatchView, draft: RubricDraft) -> None:
    """Return the edited rubric and what it would cost to ask about it, or why it is not a valid rubric yet."""
    try:
        rubric = draft.rubric()
    except RubricError as error:
        if not draft.problem:
            st.error(escape_markdown(str(error)))
        return
    if draft.is_unsaved:
        st.info("Your edits are not saved yet.")
    if view.rubric and view.assignment:
        if rubric.digest == view.rubric.digest:
            sentence = "The class is graded with this rubric"
            st.caption(
                f"{sentence}; only the rule on lateness differs." if rubric.late != view.rubric.late else f"{sentence}."
            )
            return
        changed_parts = rubric_differences(view.rubric, rubric)
        if changed_parts:
            st.caption(escape_markdown(f"Differs from what the class is graded with: {join_with_and(changed_parts)}."))


def _read(path: Path) -> str:
    try:
        return read_ordinary(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RubricError(f"{path}: the rubric can't be read: {error}; upload the file again") from None


def _prompts(view: BatchView, draft: RubricDraft) -> None:
    """Show the shared part of each prompt, as this version makes it."""
    if not view.assignment or not st.toggle("Show the prompts that this version makes"):
        return
    rubric = draft.rubric()
    for aspect in ASPECTS:
        if rubric.for_model(aspect):
            st.caption(f"{aspect}: the part that the whole class shares; the student's work follows it")
            asks_together = view.assignment.request.ask == "together"
            show_text(
                prefix(
                    aspect,
                    rubric,
                    view.assignment.solution,
                    view.assignment.template,
                    asks_together=asks_together,
                    examples=view.assignment.examples,
                )
            )
            for text, _schema in () if asks_together else questions_of(aspect, rubric).values():
                show_text(text.strip())


# --- starting and ending a round


def _start(desk: Desk, folder: Path, view: BatchView, rubric: Path, draft: RubricDraft) -> None:
    rubric_in_use = assignments.read_inputs(folder).rubric
    if not rubric_in_use:
        st.info("This assignment has no rubric yet: save this one as its first version, and grade with it under Grade.")
        return
    st.subheader("Regrade", anchor=False)
    if not view.counts().total:
        st.caption("Nothing is graded yet, so nothing is compared: the class is graded with the version in use.")
        action_button(
            "Use this version",
            lambda: assignments.use_rubric(folder, rubric),
            type="primary",
            disabled=Path(rubric_in_use) == rubric or draft.is_unsaved,
        )
        return
    names = [grade.submission for grade in view.grades]
    preselection = [name for name in st.session_state.pop("regrade names", []) if name in names]
    if preselection:
        st.session_state["regrade which"] = preselection
    # After a trial, the rest of the class is not graded yet, and the rubric may be corrected once more.
    record = assignments.grading_work(folder).record()
    trial = names if record and (record.limit or record.only) else []
    label = f"Submissions (none: {'those of the trial' if trial else 'the whole class'})"
    submissions = st.multiselect(label, names, key="regrade which", format_func=_people(view).__getitem__)
    if draft.is_unsaved:
        st.caption("Save your edits as a new version first: a round is graded with a saved version.")
    elif view.assignment:
        st.caption(escape_markdown(desk.cost(folder, draft.rubric(), submissions)))

    def regrade() -> None:
        start_round(desk.backend, folder, desk.view(folder), rubric, st.session_state["regrade which"] or trial)

    action_button("Regrade beside the present grades", regrade, type="primary", disabled=draft.is_unsaved)


def _round(desk: Desk, folder: Path, view: BatchView, place: Path) -> None:
    work = assignments.grading_work(place)
    with st.container(border=True):
        rubric = assignments.version_name(folder, Path(assignments.read_inputs(place).rubric))
        st.markdown(f"**Round {escape_markdown(place.name)}** with the rubric's {escape_markdown(rubric)}")
        draw_live(lambda: _one_round(desk, folder, view, place, work), REFRESH_S, work)


def _one_round(desk: Desk, folder: Path, view: BatchView, place: Path, work: Work) -> None:
    round_view, is_running = desk.view(place), work.is_alive
    counts = round_view.counts()
    show_problem(round_view)
    if is_running:
        jobs = f"{counts.finished_jobs} of {plural(counts.total, 'job')}"
        st.caption(jobs if counts.total else work.last_words() or "starting …")
    elif counts.open or not counts.total:
        message = (
            f"{plural(counts.open, 'job', 'has', 'have')} no result yet."
            if counts.total
            else "It ended before it began."
        )
        st.warning(escape_markdown(f"{message} {work.last_words()}".strip()))
        key = f"go on {place}"
        action_button(
            "Go on with this round", lambda: continue_round(desk.backend, folder, desk.view(folder), place), key
        )
    if not counts.total:
        return
    old_grades = {grade.submission: grade for grade in view.grades}
    new_grades = [grade for grade in round_view.grades if outcome_of(grade) != "waiting"]
    _show_differences(differences(old_grades, new_grades), view)
    if lapsing := lapsing_approvals(folder, view.grades, new_grades):
        show_text("\n".join(lapsing))
    # During a run, this part is redrawn often, and a redraw can swallow a click. So no buttons are shown.
    if counts.open or is_running:
        return
    left, right, _ = st.columns([2, 2, 4])

    def take_over() -> None:
        overrides_by_item = desk.decisions(folder).refresh()
        for grade in round_view.grades:
            if old := old_grades.get(grade.submission):
                overrides = overrides_by_item.get(old.item_id, {})
                reason = f"{ROUND_REASON} {place.name}"
                append_override(folder, *round_overrides(old, grade, reason, decider(), overrides))

    def adopt() -> None:
        adopt_round(desk.backend, folder, desk.view(folder), place, round_view.results, decider())

    action_button(
        "Take over these points",
        take_over,
        f"take {place}",
        left,
        help="Give each submission the points of this round. Points that a person has decided on stay as they are.",
    )
    action_button("Use this rubric for the class", adopt, f"adopt {place}", right)


def _show_differences(comparisons: list[Difference], view: BatchView) -> None:
    changed_grades = [difference for difference in comparisons if not difference.is_none]
    if comparisons:
        st.caption(f"{len(changed_grades)} of {len(comparisons)} are different, by the models' points.")
    if changed_grades:
        rows = [difference_row(difference, _people(view)) for difference in changed_grades]
        show_table(rows, "Grades that are different")


def _people(view: BatchView) -> dict[str, str]:
    """Return the name to show for each submission's owner."""
    return {grade.submission: grade.display_name for grade in view.grades}

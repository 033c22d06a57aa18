"""The rubric as a form, or as the text of its file. Both edit the same draft."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import streamlit as st

from desk.pages.markup import Markup
from desk.rounds import Change
from desk.text import escape_markdown
from grading.rubric.form import (
    CriterionFields,
    RubricFields,
    has_comments,
    move_criterion,
    read_fields,
    to_yaml,
    with_criterion,
)
from grading.rubric.late import LateRule
from grading.rubric.rubric import ASPECTS, Rubric, exact, parse_rubric, plain
from messages.errors import RubricError

View = Literal["Form", "YAML"]
_numbers = count(1)


@dataclass
class RubricDraft:
    """The unsaved edits. In the form its fields count; in the view of the file its text counts."""

    name: str  # name of the file that is being edited
    saved_text: str  # its text
    form: RubricFields
    text: str
    view: View = "Form"
    # Says why the text can't be shown as a form. "" means that it can.
    problem: str = ""
    # One key for each criterion. The fields of a criterion keep their key when the criterion is moved.
    keys: list[int] = field(default_factory=list)
    # This number is part of the key of every field. With a new number, the fields forget what was typed before.
    number: int = 0

    @classmethod
    def of(cls, name: str, text: str) -> "RubricDraft":
        """Return a draft without changes. Raises RubricError if the text is not a rubric."""
        draft = cls(name, text, read_fields(name, text, Path(name).suffix.lower()), text)
        draft._number()
        return draft

    @classmethod
    def begin(cls, title: str) -> "RubricDraft":
        """Return a draft for an assignment without a rubric. It has one criterion and is not saved yet."""
        first = CriterionFields("criterion_1", "First criterion")
        draft = cls.of("rubric.yaml", to_yaml(RubricFields(title, criteria=(first,))))
        draft.saved_text = ""
        return draft

    @property
    def file(self) -> tuple[str, str]:
        """The (name, text) that would be saved. If nothing has changed, it is the original text with its comments."""
        if self.view == "YAML":
            return self.name, self.text
        if self.form == read_fields(self.name, self.text, self._suffix):
            return self.name, self.text
        return str(Path(self.name).with_suffix(".yaml")), to_yaml(self.form)

    @property
    def is_unsaved(self) -> bool:
        """Whether closing the draft would lose something."""
        return self.file[1] != self.saved_text

    def rubric(self) -> Rubric:
        """Return the rubric of this draft. Raises RubricError."""
        name, text = self.file
        return parse_rubric(name, text, Path(name).suffix.lower())

    def switch_to(self, view: View) -> None:
        """Show the draft as a form or as a file.

        A text that is not a rubric is shown as text, and `problem` says why.
        """
        self.problem = ""
        if view == "Form":
            try:
                self.form = read_fields(self.name, self.text, self._suffix)
            except RubricError as error:
                self.problem = str(error)
                return
            self._number()
        else:
            self.name, self.text = self.file
            self.number = next(_numbers)
        self.view = view

    def move(self, at: int, to: int | None) -> None:
        """As `moved`."""
        self.form = move_criterion(self.form, at, to)
        key = self.keys.pop(at)
        if to is not None:
            self.keys.insert(to, key)

    def add(self) -> None:
        """Add a criterion at the end."""
        self.form = with_criterion(self.form)
        self.keys.append(next(_numbers))

    @property
    def _suffix(self) -> str:
        return Path(self.name).suffix.lower()

    def _number(self) -> None:
        self.number = next(_numbers)
        self.keys = [next(_numbers) for _ in self.form.criteria]


def edit(draft: RubricDraft, changes: Sequence[Change] = ()) -> None:
    """Draw the draft, and read what is typed into it."""
    # The view is not switched in the radio button's callback. Streamlit would call that callback too early: if the
    # person has just pressed a button of the form, the text would not contain that button's change yet.
    if (requested_view := st.session_state.get(f"rubric view {draft.number}", draft.view)) != draft.view:
        read_widgets(draft)
        draft.switch_to(requested_view)
    key = f"rubric view {draft.number}"
    st.session_state[key] = draft.view
    kind = {".json": "JSON", ".csv": "CSV"}.get(Path(draft.name).suffix.lower(), "YAML")
    st.radio(
        "Edited as",
        ["Form", "YAML"],
        key=key,
        horizontal=True,
        format_func=lambda view: kind if view == "YAML" else view,
    )
    if draft.view == "YAML":
        field = _field(draft, "text", draft.text)
        draft.text = st.text_area("Rubric", height=360, key=field, help="After a change, submissions are graded again.")
    else:
        _as_form(draft, changes)
    if draft.problem:
        st.error(escape_markdown(draft.problem))


def read_widgets(draft: RubricDraft) -> None:
    """Read the current edits from the form or from the text."""
    if draft.view == "YAML":
        draft.text = st.session_state.get(f"rubric {draft.number} text", draft.text)
    else:
        _read_form(draft)


# --- the form


def _as_form(draft: RubricDraft, changes: Sequence[Change]) -> None:
    _read_form(draft)
    form = draft.form
    _text(draft, "title", form.title, "Title")
    _text(draft, "instructions", form.instructions, "Instructions to the model", area=True)
    _text(draft, "feedback", form.feedback, "How the summary is written: language, tone", area=True)
    for at, criterion in enumerate(form.criteria):
        with st.container(border=True):
            _criterion(draft, at, criterion)
            _history(criterion.saved_id or criterion.id, changes)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("Add a criterion", on_click=_add, args=(draft,))
        st.markdown(f"**{form.total:g} points in all**")
    with st.expander("Lateness", expanded=bool(form.late.due)):
        _late(draft, form.late)
    if checks := form.rest.get("checks", []):
        st.caption(f"{len(checks)} checks are kept as they are; they are edited as YAML.")
    if has_comments(draft.text) and draft.file[1] != draft.text:
        st.caption("The file's comments are lost when a form is saved; edited as YAML they stay.")


def _criterion(draft: RubricDraft, at: int, criterion: CriterionFields) -> None:
    key, last = draft.keys[at], len(draft.keys) - 1
    wide, narrow = st.columns([3, 2])
    with wide:
        _text(draft, f"title {key}", criterion.title, "Criterion")
    with narrow:
        _text(
            draft,
            f"id {key}",
            criterion.id,
            "Id",
            help="Type a short name for the criterion. Tables and the models' answers use this name.",
        )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        _number(draft, f"points {key}", criterion.points, "Points")
        _number(draft, f"step {key}", criterion.step, "In steps of")
        st.selectbox("Model", ASPECTS, key=_field(draft, f"model {key}", criterion.model))
    _text(draft, f"guidance {key}", criterion.guidance, "Guidance, which students never see", area=True)
    _text(draft, f"rulings {key}", criterion.rulings, "Rulings on edge cases, one a line", area=True)
    with st.container(horizontal=True):
        for label, to, off in (("Up", at - 1, at == 0), ("Down", at + 1, at == last), ("Remove", None, last == 0)):
            st.button(label, key=f"rubric {label} {key}", disabled=off, on_click=_move, args=(draft, key, to))


def _add(draft: RubricDraft) -> None:
    _read_form(draft)
    draft.add()


def _move(draft: RubricDraft, key: int, to: int | None) -> None:
    _read_form(draft)
    draft.move(draft.keys.index(key), to)


def _history(criterion: str, changes: Sequence[Change]) -> None:
    criterion_changes = [change for change in changes if criterion in change.criteria]
    if criterion_changes:
        with st.expander(f"Changed {len(criterion_changes)} times" if len(criterion_changes) > 1 else "Changed once"):
            markup = Markup()
            for change in reversed(criterion_changes):
                date = time.strftime("%Y-%m-%d %H:%M", time.localtime(change.at))
                markup.caption(
                    f"{date}{f', {change.who}' if change.who else ''}, round {change.round}. Since then it reads:"
                )
                markup.verbatim(change.criteria[criterion])
            markup.draw()


def _late(draft: RubricDraft, late: LateRule) -> None:
    _text(draft, "late due", late.due, "Due, as in 2026-11-03T23:59:00+01:00; empty: no rule")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        _number(draft, "late percent", late.percent, "Percent off a day")
        _number(draft, "late grace_minutes", late.grace_minutes, "Minutes of grace")
        _number(draft, "late most_percent", late.most_percent, "Percent at most")


def _read_form(draft: RubricDraft) -> None:
    """Return the fields' current values. A field that is not drawn yet has the value that it will show."""
    criteria = []
    for key, criterion in zip(draft.keys, draft.form.criteria, strict=True):
        names = ("title", "id", "points", "step", "model", "guidance", "rulings")
        criteria.append(
            replace(criterion, **_typed_fields(draft, criterion, {name: f"{name} {key}" for name in names}))
        )
    late = _typed_fields(
        draft, draft.form.late, {name: f"late {name}" for name in ("due", "percent", "grace_minutes", "most_percent")}
    )
    top = _typed_fields(draft, draft.form, {name: name for name in ("title", "instructions", "feedback")})
    draft.form = replace(draft.form, **top, criteria=tuple(criteria), late=replace(draft.form.late, **late))


def _typed_fields(draft: RubricDraft, fields: Any, names: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, widget in names.items():
        value = st.session_state.get(f"rubric {draft.number} {widget}")
        stands = getattr(fields, name)
        if isinstance(value, float):
            value = plain(exact(value))
        values[name] = stands if value is None or value == stands else value
    return values


def _field(draft: RubricDraft, name: str, value: Any) -> str:
    field = f"rubric {draft.number} {name}"
    st.session_state.setdefault(field, value)
    return field


def _text(draft: RubricDraft, name: str, value: str, label: str, area: bool = False, help: str = "") -> None:
    widget: Any = st.text_area if area else st.text_input
    widget(label, key=_field(draft, name, value), help=help or None)


def _number(draft: RubricDraft, name: str, value: float, label: str) -> None:
    st.number_input(label, 0.0, None, step=0.5, format="%g", key=_field(draft, name, float(value)))

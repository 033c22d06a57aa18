"""What is typed and not saved yet: it outlives a reload, and is asked about before another page is shown."""

from dataclasses import replace
from pathlib import Path

import streamlit as st

from desk.decisions import Draft, Overrides, accept_grade
from desk.pages.shared import Desk, decider
from desk.text import escape_markdown
from grading.export import FinalGrade
from grading.reviews import append_override, undo_override, version_of
from messages.errors import KvasirError


def draft_of(desk: Desk, folder: Path, final: FinalGrade, overrides: Overrides) -> Draft:
    """The form of this submission: with what this browser has not saved yet, else with what stands now."""
    state, key = st.session_state, (st.session_state["browser"], folder, final.grade.item_id)
    last_draft: Draft | None = state.get("draft")
    is_same = last_draft is not None and (last_draft.folder, last_draft.item_id) == key[1:]
    draft = replace((last_draft if is_same else desk.drafts.get(key)) or Draft.begin(folder, final, overrides))
    draft.read(state)
    if not draft.is_unsaved or not draft.decisions(overrides, reason="…"):
        draft = Draft.begin(folder, final, overrides)
    if draft.is_unsaved:
        desk.drafts[key] = draft
    elif desk.drafts.get(key) is last_draft:
        desk.drafts.pop(key, None)
    state["draft"] = draft
    for field, value in draft.values.items():
        state.setdefault(draft.key(field), value)
    return draft


def discard(desk: Desk, **to: str | None) -> None:
    """Forget what is not saved, and go there."""
    draft = st.session_state.pop("draft")
    desk.drafts.pop((st.session_state["browser"], draft.folder, draft.item_id), None)
    st.session_state.update(to)


def save(desk: Desk, draft: Draft, standing: Overrides, accept: bool = False, **to: str | None) -> None:
    """Keep the draft's decisions, made in sight of what is `standing`, and go there; else stay and say why not."""
    draft.read(st.session_state)
    grade, name = draft.final.grade, decider()
    try:
        if accept:
            decisions = [replace(accept_grade(grade, name, standing.get(None)), version=version_of(standing.values()))]
        else:
            decisions = draft.decisions(standing, name)
        append_override(draft.folder, *decisions)
        if decisions:
            st.session_state["undo"] = draft.folder, draft.item_id, standing
        discard(desk, **to)
        st.session_state["said"] = "" if decisions else "Nothing was changed."
    except KvasirError as error:
        st.session_state.update(_place(draft), said=str(error))


def can_undo(draft: Draft) -> bool:
    """Whether what was last saved in this window was about this submission."""
    return bool(st.session_state.get("undo", ())[:2] == (draft.folder, draft.item_id))


def undo(desk: Desk, draft: Draft, overrides: Overrides) -> None:
    """Let stand again what stood before the last save; both stay in the record."""
    last_overrides: Overrides = st.session_state.pop("undo")[2]
    try:
        version = version_of(overrides.values())
        undo_override(draft.folder, draft.item_id, version, last_overrides.values(), decider())
        discard(desk)
        st.session_state["said"] = "What you saved last no longer counts."
    except KvasirError as error:
        st.session_state["said"] = str(error)


def asks_about_unsaved(desk: Desk) -> bool:
    """Whether a question stands in the place of the page that is wanted: what to do with the changes to another."""
    draft: Draft | None = st.session_state.get("draft")
    destination = {name: st.session_state.get(name) for name in ("assignment", "section", "submission")}
    if draft is None or destination == _place(draft):
        return False
    draft.read(st.session_state)
    if not draft.is_unsaved:
        return False
    st.session_state.pop("shown", None)  # the address follows the answer
    st.warning(escape_markdown(f"Your changes to {draft.final.grade.display_name} are not saved."))
    with st.container(horizontal=True):
        st.button("Save", type="primary", on_click=save, args=(desk, draft, draft.overrides), kwargs=destination)
        st.button("Discard", on_click=discard, args=(desk,), kwargs=destination)
        st.button("Stay", on_click=st.session_state.update, kwargs=_place(draft))
    return True


def _place(draft: Draft) -> dict[str, str]:
    return {"assignment": str(draft.folder), "section": "Review", "submission": draft.item_id}

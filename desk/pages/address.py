"""The address says what is shown: a reload, a link and the browser's Back show it again.

Anybody can write an address. Only choices that a page offers are taken from it; whether there is such an assignment or
submission is for the page to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from desk.rows import ORDERS, QUEUES
from grading.report.grades import OUTCOMES

SECTIONS = ("Grade", "Results", "Review", "Regrade", "Bound", "Export", "Fleet")
REVIEWED = {"any": None, "reviewed": True, "not reviewed": False}

Read = Callable[[Sequence[str]], Any]


def _one_of(*choices: str) -> Read:
    return lambda said: next((value for value in said if value in choices), choices[0])


# Every value that an address holds, under the key that its widget has: how it is read, and where it is shown.
_READ: dict[str, Read] = {
    "assignment": lambda said: said[0],
    "section": _one_of(*SECTIONS),
    "submission": lambda said: said[0],
    "drawn": lambda said: said[0],
    "show": lambda said: said[0] if said[0] in QUEUES else None,
    "name": lambda said: said[0],
    "state": lambda said: [value for value in OUTCOMES if value in said],
    "reviewed": _one_of(*REVIEWED),
    "order": _one_of(*ORDERS),
    "review": lambda said: said[0] == "True",
    "page": lambda said: int(said[0]) if said[0].isdecimal() and len(said[0]) < 6 else 1,
}
_IN_SECTION = {
    "Review": ("submission", "show"),
    "Results": ("name", "state", "reviewed", "order", "review", "page"),
    "Bound": ("drawn",),
}


def follow() -> None:
    """Before any widget is drawn: go where the address leads, if it is not the one that this page wrote last."""
    state = st.session_state
    asked = {name: st.query_params.get_all(name) for name in _READ if name in st.query_params}
    said, shown = _shown(), state.get("shown")
    # A reload, a link, Back or Forward. A click can come with the address of before: then a choice has changed as well.
    # Back pressed again comes with the choices of before the first, if the page has not been drawn since.
    state["went"] = asked != state.get("address") and (shown is None or said in (shown, state.get("left")))
    if state["went"]:
        state["address"] = asked
        state["remembered"] = {name: asked.get(name, [""]) for name in _READ}
        for name in _READ:
            state.pop(name, None)
    state.update(state.pop("go", {}))
    for name, values in state["remembered"].items():
        if name not in state:  # Streamlit forgets a widget that is not drawn
            state[name] = _READ[name](values)
    if state["went"] and shown is not None:  # here, not in `keep`: pressed again, Back ends this run in the middle
        state["shown"], state["left"] = _shown(), said
    _leave()


def _leave() -> None:
    """Write what the section that is left showed last, if a field of it came together with the click that leaves it.

    Such a run draws the new section alone: without this the browser's Back would show the field as it was before.
    """
    state = st.session_state
    before: dict[str, list[str]] | None = state.get("shown")
    section = (before or {}).get("section", SECTIONS[:1])[0]
    if not before or state["went"] or section == state["section"] or before.get("assignment") != [state["assignment"]]:
        return
    left = _shown(section)
    if left != before:
        state["shown"] = state["address"] = left
        state["remembered"] |= {name: [""] for name in _names(section)} | left
        st.query_params.from_dict(left)


def keep() -> None:
    """Write what is shown into the address, as a new step of the browser's history."""
    state = st.session_state
    before, shown = state.get("shown"), _shown()
    state["shown"] = shown
    state["remembered"] |= {name: [""] for name in _names(state.get("section", ""))} | shown
    went, state["went"] = state["went"], False
    if shown != before and not went:
        state.pop("left", None)
    if shown == before or shown == state["address"]:
        return
    # Where the browser's Back led, history stays as it is, or nobody would ever get past that step.
    if not went or (before is None and state["address"].items() <= shown.items()):
        state["address"] = shown
        st.query_params.from_dict(shown)


def _names(section: str) -> tuple[str, ...]:
    return ("assignment", "section", *_IN_SECTION.get(section, ())) if st.session_state.get("assignment") else ()


def _shown(section: str = "") -> dict[str, list[str]]:
    """What an address says of this page, or of another section as it was left: nothing of what is shown anyway."""
    state = st.session_state
    section = section or state.get("section", "")
    values = {name: section if name == "section" else state.get(name) for name in _names(section)}
    return {
        name: value if isinstance(value, list) else [str(value)]
        for name, value in values.items()
        if value not in (None, _READ[name]([""]))
    }


def go(section: str, assignment: str = "", submission: str = "") -> None:
    """Show another place, from the next run on."""
    will_go(section, assignment, submission)
    st.rerun()


def will_go(section: str, assignment: str = "", submission: str = "") -> None:
    """The same in a callback, which the run of its click follows."""
    wanted = {"section": section, "assignment": assignment, "submission": submission}
    st.session_state["go"] = {name: value for name, value in wanted.items() if value}

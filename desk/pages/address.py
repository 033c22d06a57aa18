"""Keeps what is shown in the address, so that a reload, a link and the browser's Back show it again.

Anybody can write an address. Only choices that a page offers are taken from it. The page itself checks whether the
assignment or submission exists.
"""

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from desk.rows import ORDERS, QUEUES
from grading.report.grades import OUTCOMES

SECTIONS = ("Grade", "Results", "Review", "Like answers", "Regrade", "Agreement", "Bound", "Export", "Fleet")
REVIEW_FILTERS = {"any": None, "reviewed": True, "not reviewed": False}

Parser = Callable[[Sequence[str]], Any]


def _choice_of(*choices: str) -> Parser:
    return lambda values: next((value for value in values if value in choices), choices[0])


# A parser for each field that an address can contain. The keys are those of the fields' widgets.
_PARSERS: dict[str, Parser] = {
    "assignment": lambda values: values[0],
    "section": _choice_of(*SECTIONS),
    "submission": lambda values: values[0],
    "drawn": lambda values: values[0],
    "show": lambda values: values[0] if values[0] in QUEUES else None,
    "name": lambda values: values[0],
    "state": lambda values: [value for value in OUTCOMES if value in values],
    "reviewed": _choice_of(*REVIEW_FILTERS),
    "order": _choice_of(*ORDERS),
    "review": lambda values: values[0] == "True",
    "page": lambda values: int(values[0]) if values[0].isdecimal() and len(values[0]) < 6 else 1,
}
_IN_SECTION = {
    "Review": ("submission", "show"),
    "Results": ("name", "state", "reviewed", "order", "review", "page"),
    "Bound": ("drawn",),
}


def follow_address() -> None:
    """Go where the address leads, unless this page wrote that address last.

    Must be called before any widget is drawn.
    """
    state = st.session_state
    address = {name: st.query_params.get_all(name) for name in _PARSERS if name in st.query_params}
    page_address, last_address = _page_address(), state.get("shown")
    # "went" is true after a reload, a link, Back or Forward. It is false after a click. The browser can then still send
    # the previous address, but a choice on the page has changed, so `page_address` differs from `last_address`.
    #
    # If the person presses Back twice before the page is drawn, the page still has the choices from before the first
    # press. "left" holds the address of these choices. The second press can also interrupt this function while it
    # handles the first press. The choices are then a mixture of old and new, but "went" is still true from that run.
    state["went"] = address != state.get("address") and (
        last_address is None or state.get("went") or page_address in (last_address, state.get("left"))
    )
    if state["went"]:
        state["address"] = address
        state["remembered"] = {name: address.get(name, [""]) for name in _PARSERS}
        for name in _PARSERS:
            state.pop(name, None)
    state.update(state.pop("go", {}))
    for name, values in state["remembered"].items():
        if name not in state:  # Streamlit forgets the values of widgets that are not drawn
            state[name] = _PARSERS[name](values)
    # The addresses are saved here, because a second press of Back can end this run before it calls `write_address`.
    if state["went"] and last_address is not None:
        state["shown"], state["left"] = _page_address(), page_address
    _leave()


def _leave() -> None:
    """Write the old section's address, if one of its fields changed together with the click that leaves it.

    Such a run draws only the new section. Without this, the browser's Back would show the field's old value.
    """
    state = st.session_state
    last_address: dict[str, list[str]] | None = state.get("shown")
    section = (last_address or {}).get("section", SECTIONS[:1])[0]
    if (
        not last_address
        or state["went"]
        or section == state["section"]
        or last_address.get("assignment") != [state["assignment"]]
    ):
        return
    section_address = _page_address(section)
    if section_address != last_address:
        state["shown"] = state["address"] = section_address
        state["remembered"] |= {name: [""] for name in _names(section)} | section_address
        st.query_params.from_dict(section_address)


def write_address() -> None:
    """Write what is shown into the address, as a new step in the browser's history."""
    state = st.session_state
    last_address, page_address = state.get("shown"), _page_address()
    state["shown"] = page_address
    state["remembered"] |= {name: [""] for name in _names(state.get("section", ""))} | page_address
    has_navigated, state["went"] = state["went"], False
    if page_address != last_address and not has_navigated:
        state.pop("left", None)
    if page_address == last_address or page_address == state["address"]:
        return
    # After Back, no step is added to the browser's history, because a new step would remove the steps that Forward
    # leads to.
    if not has_navigated or (last_address is None and state["address"].items() <= page_address.items()):
        state["address"] = page_address
        st.query_params.from_dict(page_address)


def _names(section: str) -> tuple[str, ...]:
    return ("assignment", "section", *_IN_SECTION.get(section, ())) if st.session_state.get("assignment") else ()


def _page_address(section: str = "") -> dict[str, list[str]]:
    """Return the address of this page, or of another section with its last choices. Default values are left out."""
    state = st.session_state
    section = section or state.get("section", "")
    values = {name: section if name == "section" else state.get(name) for name in _names(section)}
    return {
        name: value if isinstance(value, list) else [str(value)]
        for name, value in values.items()
        if value not in (None, _PARSERS[name]([""]))
    }


def go(section: str, assignment: str = "", submission: str = "") -> None:
    """Show another place, starting with the next run."""
    go_next(section, assignment, submission)
    st.rerun()


def go_next(section: str, assignment: str = "", submission: str = "") -> None:
    """Show another place from a callback, which is followed by a run."""
    destination = {"section": section, "assignment": assignment, "submission": submission}
    st.session_state["go"] = {name: value for name, value in destination.items() if value}

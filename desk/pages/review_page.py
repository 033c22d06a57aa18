"""One submission: the work beside the grade, and a person's word on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import streamlit as st

from desk.decisions import Decided, Draft
from desk.pages.address import keep
from desk.pages.markup import Markup
from desk.pages.shared import COOKIE, Desk, decider, live, say_problem, sentences, text
from desk.pages.unsaved import asks_about_unsaved, can_undo, discard, draft_of, save, undo
from desk.pages.work import MOST_CHARS, drawn_work
from desk.rows import QUEUES, Row, select
from desk.text import escaped
from desk.view import BatchView
from grading.export import Request, add_requests, answer, points_of
from grading.grade import Item
from grading.points import CriterionGrade
from grading.report.grades import show_distribution, show_points
from grading.reviews import Override, version_of
from grading.rubric.rubric import Criterion
from messages.errors import KvasirError

_MOST_BUTTONS = 9  # points of a criterion: as many as there are keys
_KEYS = {
    "j, k": "the next, or the previous, submission",
    "0 to 9": "so many points for the criterion marked ▸, which then moves on to the next",
    "e": "write feedback on it",
    "w": "say why the grade is changed",
    "Esc": "leave the field",
    "s": "save the change",
    "a": "leave it as it is",
    "u": "discard what is not saved, or undo the last save",
    "?": "this list",
}
_NAME_HELP = "Kept in this browser and written beside your decisions; in no file for a learning platform or a student."
# A field is sent when it is left; here also when somebody pauses or goes, so that no reload and no Back loses words.
# So are keys where a section was just chosen: until then they are its radio button's.
_SCRIPT = """; path=/; max-age=31536000; samesite=strict';
if (document.activeElement.type === "radio") document.activeElement.blur();
if (!window.kvasir) {
  window.kvasir = 1;
  const enter = {key: "Enter", code: "Enter", ctrlKey: true, bubbles: true};
  addEventListener("beforeunload", () => document.activeElement.blur());
  addEventListener("click", ({detail, target}) => {  // with the mouse; whoever uses the arrow keys stays there
    const section = target.closest("[data-testid=stSidebar] label");
    if (detail && section) setTimeout(() => document.activeElement.blur(), 100);
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const {key, target} = event;
    // Where the browser writes 2.5, its number fields pass a comma over: 2,5 would become 25.
    if (key === "," && target.type === "number" && (1.5).toLocaleString().includes(".")) {
      event.preventDefault();
      document.execCommand("insertText", false, ".");
    }
    if (!document.querySelector(".st-key-form")) return;
    if (target.matches("input, textarea, [contenteditable]")) return key === "Escape" && target.blur();
    if (/^[0-9]$/.test(key)) {
      const buttons = [...document.querySelectorAll(".st-key-points-at-hand button")];
      buttons.find((button) => button.innerText.trim() === key)?.click();
      return;
    }
    const fields = {e: ".st-key-at-hand textarea", w: ".st-key-why input", "?": ".keys summary"};
    const field = fields[key] && document.querySelector(fields[key]);
    if (!field) return;
    event.preventDefault();
    if (key === "?") field.click();
    else field.focus();
  });
  addEventListener("input", ({target}) => {
    clearTimeout(window.kvasir);
    if (target.closest(".st-key-form"))
      window.kvasir = setTimeout(() => {  // up again too, or the buttons' keys wait for it
        for (const press of ["keydown", "keyup"]) target.dispatchEvent(new KeyboardEvent(press, enter));
      }, 300);
  });
}"""


def show(desk: Desk, folder: Path) -> None:
    """Draw it; a click on it draws it alone, without the page around it."""

    def submission() -> None:
        with sentences():
            _submission(desk, folder)

    live(submission, None)


def _submission(desk: Desk, folder: Path) -> None:
    if asks_about_unsaved(desk):
        return
    view, rows, decided = desk.rows(folder)
    if desk.by_people(folder) != st.session_state["counted"]:  # the side bar says how many still wait
        st.rerun()
    say_problem(view)
    if not rows:
        st.caption("Nothing is graded yet.")
        return
    row = _pick(desk, folder, rows)
    keep()
    keep_typed(desk)
    item = view.item(row.number)
    with st.container(key="beside"):
        work, verdict = st.columns(2)
    with work:
        found = (one for one in row.final.grade.criteria if one.evidence_state == "found")
        show_work(desk, view, item, {one.id: one.evidence for one in found})
    with verdict, st.container(key="form"):
        _verdict(desk, folder, view, row, decided.get(_id(row), {}))
    _prompt(view, item)


def _pick(desk: Desk, folder: Path, rows: list[Row]) -> Row:
    """The submission that is looked at, with ways to the next of those that wait, or of all."""
    state = st.session_state
    waiting = {name: select(rows, wanted) for name, wanted in QUEUES.items()}
    if state.get("show") is None:
        state["show"] = next(name for name, found in waiting.items() if found)
    by_id = {row.final.grade.item_id: row for row in rows}
    elsewhere = desk.open_elsewhere(folder, state["browser"])
    if state.get("submission") not in by_id:
        first = waiting[state["show"]] or rows
        state["submission"] = next((id for id in map(_id, first) if id not in elsewhere), _id(first[0]))
    here = by_id[state["submission"]]
    desk.opened(folder, _id(here), state["browser"])
    ids = _queue(state["show"], waiting[state["show"]], here)
    at = ids.index(_id(here))
    before, after = ids[:at][::-1], ids[at + 1 :]
    # One element that lays out its own is half the work of columns, for the browser as for the desk.
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button(
            "Previous", disabled=elsewhere.issuperset(before), on_click=_go, args=(desk, folder, before), shortcut="K"
        )
        st.selectbox("Submission", ids, format_func=lambda id: by_id[id].name, key="submission")
        st.button("Next", disabled=elsewhere.issuperset(after), on_click=_go, args=(desk, folder, after), shortcut="J")
        st.selectbox("Show", list(QUEUES), key="show")
        ask_name()
    said = Markup()
    said.states(_counted(waiting, len(rows)))
    if _id(here) in elsewhere:
        said.caption("Somebody else has this one open.")
    said.keys(_KEYS)
    said.draw()
    return here


def _counted(waiting: Mapping[str, Sequence[Row]], total: int) -> dict[str, str]:
    """How many are in each queue, with the state that they are in."""
    doubtful, asked, without = (len(waiting[name]) for name in list(QUEUES)[:3])
    counted = {f"{doubtful} of {total} need review": "open" if doubtful else "settled"}
    if asked:
        counted[f"{asked} asked for another look"] = "open"
    if without:
        counted[f"{without} without points"] = "missing"
    return counted


def _id(row: Row) -> str:
    return row.final.grade.item_id


def _queue(show: str, waiting: Sequence[Row], here: Row) -> list[str]:
    """Who is gone through, in order; the one that is looked at keeps its place, even if it waits no longer."""
    if here in waiting:
        return [_id(row) for row in waiting]
    doubtful = QUEUES[show].needs_review

    def place(row: Row) -> tuple[int, int]:
        return (-len(row.final.grade.doubts) if doubtful else 0, row.number)

    return [_id(row) for row in sorted([*waiting, here], key=place)]


def _go(desk: Desk, folder: Path, ahead: Sequence[str]) -> None:
    """To the first that nobody else has open by now; nowhere if there is none."""
    elsewhere = desk.open_elsewhere(folder, st.session_state["browser"])
    free = next((id for id in ahead if id not in elsewhere), st.session_state["submission"])
    st.session_state.update(submission=free, criterion=None)


def ask_name() -> None:
    """Asked once: the browser keeps it, and no address does."""
    state = st.session_state
    state.setdefault("your name", state["me"])
    state["me"] = " ".join(st.text_input("Your name", max_chars=80, key="your name", help=_NAME_HELP).split())
    kept = quote(f"{state['browser']} {state['me']}", safe="")
    st.html(f"<script>document.cookie = '{COOKIE}={kept}{_SCRIPT}</script>", unsafe_allow_javascript=True)


# --- the work


def show_work(desk: Desk, view: BatchView, item: Item, quotes: Mapping[str, str]) -> None:
    """What was handed in; the lines quoted as evidence are highlighted, each with its criterion's id (`quotes`)."""
    submission = item.submission
    if submission.problem:
        st.error(escaped(submission.problem))
    whole = sum(len(part.text) for part in submission.parts)
    everything = whole <= MOST_CHARS or st.toggle(f"Show all {whole:,} characters", key=f"all {item.item_id}")
    most = whole if everything else MOST_CHARS
    assert view.assignment
    folder = view.assignment.request.folder
    key, stamp = ("work", view.folder, item.item_id), (submission, most, *quotes.items())
    desk.kept(key, stamp, lambda: drawn_work(folder, submission, quotes, most)).draw()


# --- the grade


def _verdict(desk: Desk, folder: Path, view: BatchView, row: Row, decided: Decided) -> None:
    grade = row.final.grade
    said_of_it = Markup()
    said_of_it.figures(
        {
            "Final points": f"{show_points(row.points) or '–'} / {show_points(grade.max_points)}",
            "By the model": show_points(row.ai) or "–",
        }
    )
    if row.final.penalty:
        said_of_it.caption(row.final.penalty.words)
    said_of_it.states({_state(row): _kind_of(row)})
    for remark in row.remarks:
        said_of_it.caption(f"remark: {remark}")
    said_of_it.draw()
    if grade.reason:
        st.warning(escaped(grade.reason))
    assert view.rubric
    by_id = {criterion.id: criterion for criterion in view.rubric.criteria}
    _requests(desk, folder, row)
    draft = draft_of(desk, folder, row.final, decided)
    ids = [item.id for item in grade.criteria]
    state = st.session_state
    if state.get("criterion") not in [*ids, "done"]:
        asked = [doubt.criterion_id for doubt in grade.doubts if doubt.criterion_id in ids]
        state["criterion"] = next(iter([*asked, *ids]), None)
    for item, after in zip(grade.criteria, [*ids[1:], "done"], strict=True):
        _criterion(draft, by_id.get(item.id), item, after)
    st.text_area("Summary", key=draft.key("summary"))
    with st.container(key="why"):
        st.text_input("Reason for the change", key=draft.key("reason"))
    _keep_or_not(desk, draft, row, decided)
    _history(decided)


def _requests(desk: Desk, folder: Path, row: Row) -> None:
    """What the student asked, and a field for the reply to each."""
    if said := st.session_state.pop("said of request", ""):
        st.warning(escaped(said))
    for request in row.requests:
        told = Markup()
        about = f" about {request.criterion_id}" if request.criterion_id else ""
        then = show_points(request.points) or "none"
        told.title(f"{'⚑ ' if request.answer is None else ''}Asked for another look{about}; points then: {then}")
        told.verbatim(request.text)
        if request.answer:
            by = f" ({request.answer.by})" if request.answer.by else ""
            told.caption(f"Replied{by}:")
            told.verbatim(request.answer.reply)
        told.draw()
        reply = f"reply {request.id}"
        if request.answer is None or st.session_state.get(reply):  # written while somebody else was replying
            st.text_area("Reply, which the student gets", key=reply)
            args = (desk, folder, row, request, reply)
            st.button("Reply", on_click=_reply, args=args, key=f"send {request.id}")
    if st.toggle("Enter a request of this student", key="request"):  # an expander draws what it hides, at each click
        criteria = [criterion.id for criterion in row.final.criteria]
        names = {"about": f"asked about {_id(row)}", "text": f"asked {_id(row)}"}
        st.selectbox("About", ["", *criteria], format_func=lambda id: id or "the whole grade", key=names["about"])
        st.text_area("The student's words", key=names["text"])
        st.button("Enter it", on_click=_enter, args=(desk, folder, row, names), key=f"enter {_id(row)}")


def keep_typed(desk: Desk) -> None:
    """Replies and requests that were begun outlive other pages, on which Streamlit forgets fields, and a reload."""
    state = st.session_state
    typed = desk.typed.setdefault(state["browser"], {})
    typed.update({str(name): state[name] for name in state if str(name).startswith(("reply ", "asked "))})
    for name, said in typed.items():
        state[name] = said


def _forget_typed(desk: Desk, *names: str) -> None:
    for name in names:
        desk.typed[st.session_state["browser"]].pop(name, None)
        st.session_state.pop(name, None)


def _reply(desk: Desk, folder: Path, row: Row, request: Request, reply: str) -> None:
    points = points_of(row.final, request.criterion_id)
    if _kept(lambda: answer(folder, request, st.session_state[reply], points, decider())):
        _forget_typed(desk, reply)


def _enter(desk: Desk, folder: Path, row: Row, names: Mapping[str, str]) -> None:
    about, said = st.session_state[names["about"]] or None, st.session_state[names["text"]]
    if _kept(lambda: add_requests(folder, [Request.about(row.final, about, said, decider())])):
        _forget_typed(desk, *names.values())


def _kept(keep: Callable[[], object]) -> bool:
    """Whether it was kept; why not is said above the requests."""
    try:
        keep()
    except KvasirError as error:
        st.session_state["said of request"] = str(error)
        return False
    return True


def _state(row: Row) -> str:
    if row.state == "waiting":
        return "waiting for its results"
    if row.reviewed and not row.final.why_blank:
        return "The grade is final: no question is open."
    return f"⚑ {row.final.why_blank}" if row.needs_review else row.final.why_blank or row.state


def _kind_of(row: Row) -> str:
    if row.state == "waiting":
        return "waiting"
    if row.needs_review or row.asked:
        return "open"
    return "missing" if row.final.why_blank else "settled"


def _criterion(draft: Draft, criterion: Criterion | None, item: CriterionGrade, after: str) -> None:
    """What the form says of one criterion; `after` is the one that the keys are about once this has its points."""
    here = st.session_state["criterion"] == item.id
    model = f"model: {show_points(item.points) or 'no points'} of {show_points(item.max_points)}"
    head = Markup()
    head.title(f"▸ {item.title}" if here else item.title)
    head.caption(f"{model}; evidence {item.evidence_state}" if item.points is not None else item.reason or model)
    if item.distribution:
        head.caption(show_distribution(item))
    if item.evidence:
        head.verbatim(item.evidence)
    head.draw()
    _buttons(draft, criterion, item, after, here)
    st.number_input(
        f"Points for {item.id}",
        0.0,
        float(item.max_points),
        None,
        float(criterion.step) if criterion else 1.0,
        format="%g",
        key=draft.key(f"points {item.id}"),
    )
    with st.container(key="at hand" if here else None):
        st.text_area(f"Feedback on {item.id}", key=draft.key(f"feedback {item.id}"))


def _buttons(draft: Draft, criterion: Criterion | None, item: CriterionGrade, after: str, here: bool) -> None:
    """A button for each whole number of points, where these are few; keys press those of the criterion at hand."""
    if item.max_points > _MOST_BUTTONS or (criterion and criterion.step > 1):
        return
    field = draft.key(f"points {item.id}")
    given = st.session_state.get(field)
    with st.container(horizontal=True, gap="small", key="points-at-hand" if here else None):
        for points in range(int(item.max_points) + 1):
            st.button(
                str(points),
                key=f"give {points} {item.id}",
                type="primary" if given == points else "secondary",
                on_click=_give,
                args=(field, float(points), after),
            )


def _give(field: str, points: float, after: str) -> None:
    st.session_state.update({field: points, "criterion": after})


def _keep_or_not(desk: Desk, draft: Draft, row: Row, decided: Decided) -> None:
    """The end of the form; where somebody has decided since it was begun, both decisions and which of them counts."""
    said = st.session_state.pop("said", "")
    conflict = version_of(draft.decided.values()) != version_of(decided.values())
    if conflict:
        st.warning("Somebody has decided on this submission since you began. Nothing of yours is saved yet.")
        theirs, yours = st.columns(2)
        with theirs:
            gone = [id or "whole" for id in draft.decided if id not in decided]
            _told("Theirs", [each for id, each in decided.items() if draft.decided.get(id) != each], gone)
        with yours:
            _told("Yours", draft.decisions(decided, decider(), draft.values["reason"] or "…"))
    elif said or draft.unsaved:
        st.warning(escaped(said or "There are unsaved changes."))
    elif row.reviewed:
        st.info(escaped(_state(row)))
    with st.container(horizontal=True):
        if conflict:
            st.button("Mine replaces it", type="primary", on_click=save, args=(desk, draft, decided))
        else:
            st.button("Save the change", type="primary", on_click=save, args=(desk, draft, decided), shortcut="S")
            accept = {"on_click": save, "args": (desk, draft, decided, True), "shortcut": "A"}
            st.button("Leave it as it is", disabled=draft.unsaved, **accept)
        if draft.unsaved:
            st.button("Keep theirs" if conflict else "Discard", on_click=discard, args=(desk,), shortcut="U")
        elif can_undo(draft):
            st.button("Undo", on_click=undo, args=(desk, draft, decided), shortcut="U")


def _told(title: str, decisions: Iterable[Override], undone: Iterable[str] = ()) -> None:
    told = Markup()
    told.title(title)
    for what in undone:
        told.caption(f"{what}: the decision was undone")
    for override in decisions:
        what = f"{override.criterion_id or 'whole'}: {show_points(override.points) or 'points unchanged'}"
        told.caption(f"{what} — {override.reason}{f' ({override.reviewer})' if override.reviewer else ''}")
        if override.feedback:
            told.verbatim(override.feedback)
    told.draw()


def _history(decided: Decided) -> None:
    if decided:
        with st.expander("Decisions"):
            _told("", sorted(decided.values(), key=lambda each: each.time))


# --- the prompt


def _prompt(view: BatchView, item: Item) -> None:
    if not item.tasks or not st.toggle("Show the exact prompts and answers"):
        return
    for task in item.tasks:
        result = view.result(task.job_id)
        st.markdown(escaped(f"{task.role}, to {task.model}; job {task.job_id}"))
        text(task.prompt.shared + task.prompt.own)
        if not task.asked:
            text(result.text if result else "no answer yet")
        for _, question, answers in task.answered(result):
            if question:
                text(question.suffix[0].text.strip())
                for said in [answer.text for answer in answers] or ["no answer yet"]:
                    text(said)

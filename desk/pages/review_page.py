"""One submission: the work beside the grade, and a person's word on it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import streamlit as st

from desk.decisions import Draft, Overrides
from desk.pages.address import write_address
from desk.pages.markup import Markup
from desk.pages.shared import COOKIE, Desk, decider, draw_live, point_buttons, show_problem, show_text
from desk.pages.unsaved import asks_about_unsaved, can_undo, discard, draft_of, save, undo
from desk.pages.work import MOST_CHARS, draw_work
from desk.rows import QUEUES, Row, select
from desk.text import escape_markdown
from desk.view import BatchView
from grading.export import Request, add_requests, points_of, save_reply
from grading.jobs import Item
from grading.points import CriterionGrade
from grading.report.grades import show_distribution, show_points
from grading.reviews import Override, version_of
from grading.rubric.rubric import Criterion
from messages.errors import KvasirError
from messages.jobs import prompt_text

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


def show_review_page(desk: Desk, folder: Path) -> None:
    """Draw it; a click on it draws it alone, without the page around it."""
    draw_live(lambda: _submission(desk, folder))


def _submission(desk: Desk, folder: Path) -> None:
    if asks_about_unsaved(desk):
        return
    view, rows, overrides_by_item = desk.rows(folder)
    if desk.by_people(folder) != st.session_state["counted"]:  # the side bar says how many still wait
        st.rerun()
    show_problem(view)
    if not rows:
        st.caption("Nothing is graded yet.")
        return
    row = _pick(desk, folder, rows)
    write_address()
    keep_unsent_fields(desk)
    item = view.item(row.number)
    with st.container(key="beside"):
        work, verdict = st.columns(2)
    with work:
        quoted_criteria = (criterion for criterion in row.final.grade.criteria if criterion.evidence_state == "found")
        show_work(desk, view, item, {criterion.id: criterion.evidence for criterion in quoted_criteria})
    with verdict, st.container(key="form"):
        _verdict(desk, folder, view, row, overrides_by_item.get(_id(row), {}))
    _prompt(view, item)


def _pick(desk: Desk, folder: Path, rows: list[Row]) -> Row:
    """The submission that is looked at, with ways to the next of those that wait, or of all."""
    state = st.session_state
    queues = {name: select(rows, row_filter) for name, row_filter in QUEUES.items()}
    if state.get("show") is None:
        state["show"] = next(name for name, queue in queues.items() if queue)
    by_id = {row.final.grade.item_id: row for row in rows}
    open_elsewhere = desk.open_elsewhere(folder, state["browser"])
    if state.get("submission") not in by_id:
        first = queues[state["show"]] or rows
        state["submission"] = next((id for id in map(_id, first) if id not in open_elsewhere), _id(first[0]))
    current_row = by_id[state["submission"]]
    desk.note_open(folder, _id(current_row), state["browser"])
    ids = _queue(state["show"], queues[state["show"]], current_row)
    at = ids.index(_id(current_row))
    before, after = ids[:at][::-1], ids[at + 1 :]
    # One element that lays out its own is half the work of columns, for the browser as for the desk.
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button(
            "Previous",
            disabled=open_elsewhere.issuperset(before),
            on_click=_go,
            args=(desk, folder, before),
            shortcut="K",
        )
        st.selectbox("Submission", ids, format_func=lambda id: by_id[id].name, key="submission")
        st.button(
            "Next", disabled=open_elsewhere.issuperset(after), on_click=_go, args=(desk, folder, after), shortcut="J"
        )
        st.selectbox("Show", list(QUEUES), key="show")
        ask_name()
    markup = Markup()
    markup.states(_queue_states(queues, len(rows)))
    if _id(current_row) in open_elsewhere:
        markup.caption("Somebody else has this one open.")
    markup.keys(_KEYS)
    markup.draw()
    return current_row


def _queue_states(queues: Mapping[str, Sequence[Row]], total: int) -> dict[str, str]:
    """How many are in each queue, with the state that they are in."""
    doubtful, awaiting_reply, without_points = (len(queues[name]) for name in list(QUEUES)[:3])
    states = {f"{doubtful} of {total} need review": "open" if doubtful else "settled"}
    if awaiting_reply:
        states[f"{awaiting_reply} asked for another look"] = "open"
    if without_points:
        states[f"{without_points} without points"] = "missing"
    return states


def _id(row: Row) -> str:
    return row.final.grade.item_id


def _queue(show: str, queue: Sequence[Row], current_row: Row) -> list[str]:
    """Who is gone through, in order; the one that is looked at keeps its place, even if it waits no longer."""
    if current_row in queue:
        return [_id(row) for row in queue]
    doubtful = QUEUES[show].needs_review

    def place(row: Row) -> tuple[int, int]:
        return (-len(row.final.grade.doubts) if doubtful else 0, row.number)

    return [_id(row) for row in sorted([*queue, current_row], key=place)]


def _go(desk: Desk, folder: Path, ahead: Sequence[str]) -> None:
    """To the first that nobody else has open by now; nowhere if there is none."""
    open_elsewhere = desk.open_elsewhere(folder, st.session_state["browser"])
    free = next((id for id in ahead if id not in open_elsewhere), st.session_state["submission"])
    st.session_state.update(submission=free, criterion=None)


def ask_name() -> None:
    """Asked once: the browser keeps it, and no address does."""
    state = st.session_state
    state.setdefault("your name", state["me"])
    state["me"] = " ".join(st.text_input("Your name", max_chars=80, key="your name", help=_NAME_HELP).split())
    cookie = quote(f"{state['browser']} {state['me']}", safe="")
    st.html(f"<script>document.cookie = '{COOKIE}={cookie}{_SCRIPT}</script>", unsafe_allow_javascript=True)


# --- the work


def show_work(desk: Desk, view: BatchView, item: Item, quotes: Mapping[str, str]) -> None:
    """What was handed in; the lines quoted as evidence are highlighted, each with its criterion's id (`quotes`)."""
    submission = item.submission
    if submission.problem:
        st.error(escape_markdown(submission.problem))
    whole = sum(len(part.text) for part in submission.parts)
    shows_all = whole <= MOST_CHARS or st.toggle(f"Show all {whole:,} characters", key=f"all {item.item_id}")
    most_chars = whole if shows_all else MOST_CHARS
    assert view.assignment
    folder = view.assignment.request.folder
    key, stamp = ("work", view.folder, item.item_id), (submission, most_chars, *quotes.items())
    desk.get_or_make(key, stamp, lambda: draw_work(folder, submission, quotes, most_chars)).draw()


# --- the grade


def _verdict(desk: Desk, folder: Path, view: BatchView, row: Row, overrides: Overrides) -> None:
    grade = row.final.grade
    head = Markup()
    head.figures(
        {
            "Final points": f"{show_points(row.points) or '–'} / {show_points(grade.max_points)}",
            "By the model": show_points(row.ai) or "–",
        }
    )
    if row.final.penalty:
        head.caption(row.final.penalty.words)
    head.states({_state(row): _kind_of(row)})
    for remark in row.remarks:
        head.caption(f"remark: {remark}")
    head.draw()
    if grade.reason:
        st.warning(escape_markdown(grade.reason))
    assert view.rubric
    by_id = {criterion.id: criterion for criterion in view.rubric.criteria}
    _requests(desk, folder, row)
    draft = draft_of(desk, folder, row.final, overrides)
    ids = [item.id for item in grade.criteria]
    state = st.session_state
    if state.get("criterion") not in [*ids, "done"]:
        doubtful_ids = [doubt.criterion_id for doubt in grade.doubts if doubt.criterion_id in ids]
        state["criterion"] = next(iter([*doubtful_ids, *ids]), None)
    for item, next_id in zip(grade.criteria, [*ids[1:], "done"], strict=True):
        _criterion(draft, by_id.get(item.id), item, next_id)
    st.text_area("Summary", key=draft.key("summary"))
    with st.container(key="why"):
        st.text_input("Reason for the change", key=draft.key("reason"))
    _form_end(desk, draft, row, overrides)
    if overrides:
        with st.expander("Decisions"):
            _show_decisions("", sorted(overrides.values(), key=lambda override: override.time))


def _requests(desk: Desk, folder: Path, row: Row) -> None:
    """What the student asked, and a field for the reply to each."""
    if problem := st.session_state.pop("said of request", ""):
        st.warning(escape_markdown(problem))
    for request in row.requests:
        markup = Markup()
        about = f" about {request.criterion_id}" if request.criterion_id else ""
        points_then = show_points(request.points) or "none"
        markup.title(
            f"{'⚑ ' if request.answer is None else ''}Asked for another look{about}; points then: {points_then}"
        )
        markup.verbatim(request.text)
        if request.answer:
            by = f" ({request.answer.by})" if request.answer.by else ""
            markup.caption(f"Replied{by}:")
            markup.verbatim(request.answer.reply)
        markup.draw()
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


def keep_unsent_fields(desk: Desk) -> None:
    """Replies and requests that were begun outlive other pages, on which Streamlit forgets fields, and a reload."""
    state = st.session_state
    fields = desk.unsent_fields.setdefault(state["browser"], {})
    fields.update({str(name): state[name] for name in state if str(name).startswith(("reply ", "asked "))})
    for name, content in fields.items():
        state[name] = content


def _forget_fields(desk: Desk, *names: str) -> None:
    for name in names:
        desk.unsent_fields[st.session_state["browser"]].pop(name, None)
        st.session_state.pop(name, None)


def _reply(desk: Desk, folder: Path, row: Row, request: Request, reply: str) -> None:
    points = points_of(row.final, request.criterion_id)
    if _try_to_keep(lambda: save_reply(folder, request, st.session_state[reply], points, decider())):
        _forget_fields(desk, reply)


def _enter(desk: Desk, folder: Path, row: Row, names: Mapping[str, str]) -> None:
    criterion_id, words = st.session_state[names["about"]] or None, st.session_state[names["text"]]
    if _try_to_keep(lambda: add_requests(folder, [Request.about(row.final, criterion_id, words, decider())])):
        _forget_fields(desk, *names.values())


def _try_to_keep(keep: Callable[[], object]) -> bool:
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
    if row.is_reviewed and not row.final.why_blank:
        return "The grade is final: no question is open."
    return f"⚑ {row.final.why_blank}" if row.needs_review else row.final.why_blank or row.state


def _kind_of(row: Row) -> str:
    if row.state == "waiting":
        return "waiting"
    if row.needs_review or row.awaits_reply:
        return "open"
    return "missing" if row.final.why_blank else "settled"


def _criterion(draft: Draft, criterion: Criterion | None, item: CriterionGrade, next_id: str) -> None:
    """What the form says of one criterion; `next_id` is the one that the keys are about once this has its points."""
    is_current = st.session_state["criterion"] == item.id
    model = f"model: {show_points(item.points) or 'no points'} of {show_points(item.max_points)}"
    head = Markup()
    head.title(f"▸ {item.title}" if is_current else item.title)
    head.caption(f"{model}; evidence {item.evidence_state}" if item.points is not None else item.reason or model)
    if item.distribution:
        head.caption(show_distribution(item))
    if item.evidence:
        head.verbatim(item.evidence)
    head.draw()
    field, step = draft.key(f"points {item.id}"), criterion.step if criterion else 1
    bounds = item.min_points, item.max_points
    point_buttons(item.id, *bounds, step, field, is_current, _enter_points, (field, next_id))
    st.number_input(f"Points for {item.id}", *map(float, bounds), None, float(step), format="%g", key=field)
    with st.container(key="at hand" if is_current else None):
        st.text_area(f"Feedback on {item.id}", key=draft.key(f"feedback {item.id}"))


def _enter_points(points: float, field: str, next_id: str) -> None:
    st.session_state.update({field: points, "criterion": next_id})


def _form_end(desk: Desk, draft: Draft, row: Row, overrides: Overrides) -> None:
    """The end of the form; where somebody has decided since it was begun, both decisions and which of them counts."""
    message = st.session_state.pop("said", "")
    conflict = version_of(draft.overrides.values()) != version_of(overrides.values())
    if conflict:
        st.warning("Somebody has decided on this submission since you began. Nothing of yours is saved yet.")
        their_column, own_column = st.columns(2)
        with their_column:
            undone_ids = [id or "whole" for id in draft.overrides if id not in overrides]
            _show_decisions(
                "Theirs",
                [override for id, override in overrides.items() if draft.overrides.get(id) != override],
                undone_ids,
            )
        with own_column:
            _show_decisions("Yours", draft.decisions(overrides, decider(), draft.values["reason"] or "…"))
    elif message or draft.is_unsaved:
        st.warning(escape_markdown(message or "There are unsaved changes."))
    elif row.is_reviewed:
        st.info(escape_markdown(_state(row)))
    with st.container(horizontal=True):
        if conflict:
            st.button("Mine replaces it", type="primary", on_click=save, args=(desk, draft, overrides))
        else:
            st.button("Save the change", type="primary", on_click=save, args=(desk, draft, overrides), shortcut="S")
            accept = {"on_click": save, "args": (desk, draft, overrides, True), "shortcut": "A"}
            st.button("Leave it as it is", disabled=draft.is_unsaved, **accept)
        if draft.is_unsaved:
            st.button("Keep theirs" if conflict else "Discard", on_click=discard, args=(desk,), shortcut="U")
        elif can_undo(draft):
            st.button("Undo", on_click=undo, args=(desk, draft, overrides), shortcut="U")


def _show_decisions(title: str, decisions: Iterable[Override], undone_ids: Iterable[str] = ()) -> None:
    markup = Markup()
    markup.title(title)
    for label in undone_ids:
        markup.caption(f"{label}: the decision was undone")
    for override in decisions:
        label = f"{override.criterion_id or 'whole'}: {show_points(override.points) or 'points unchanged'}"
        markup.caption(f"{label} — {override.reason}{f' ({override.reviewer})' if override.reviewer else ''}")
        if override.feedback:
            markup.verbatim(override.feedback)
    markup.draw()


# --- the prompt


def _prompt(view: BatchView, item: Item) -> None:
    if not item.tasks or not st.toggle("Show the exact prompts and answers"):
        return
    for task in item.tasks:
        result = view.result(task.job.job_id)
        st.markdown(escape_markdown(f"{task.aspect}, to {task.job.model}; job {task.job.job_id}"))
        show_text(prompt_text(task.job.prompt))
        if not task.questions_by_key:
            show_text(result.text if result else "no answer yet")
        for _, question, answers in task.question_answers(result):
            if question:
                show_text(question.suffix[0].text.strip())
                for answer_text in [answer.text for answer in answers] or ["no answer yet"]:
                    show_text(answer_text)

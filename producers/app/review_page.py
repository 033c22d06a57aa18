"""One submission: the work beside the grade, and a person's word on it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import streamlit as st

from producers.app.address import keep
from producers.app.markup import Markup
from producers.app.shared import COOKIE, Desk, decider, live, sentences, text
from producers.app.unsaved import asks_about_unsaved, discard, draft_of, save
from producers.batch.grade import Item
from producers.desk.decisions import Decided, Draft
from producers.desk.rows import QUEUES, Row, select
from producers.desk.text import SHOWN_CHARS, escaped, shortened
from producers.desk.view import BatchView
from producers.grading.points import CriterionGrade
from producers.grading.quotes import quoted_lines
from producers.grading.reviews import Override, version_of
from producers.report.grades import show_points
from producers.rubric.rubric import Criterion
from producers.words import plural

_HEIGHT = 760
_MOST_CHARS = 60_000  # of a submission, until everything is asked for
_NAME_HELP = "Kept in this browser and written beside your decisions; in no file for a learning platform or a student."
# A field is sent when it is left; here also when somebody pauses or goes, so that no reload and no Back loses words.
_SCRIPT = """; path=/; max-age=31536000; samesite=strict';
if (!window.kvasir) {
  window.kvasir = 1;
  const enter = {key: "Enter", code: "Enter", ctrlKey: true, bubbles: true};
  addEventListener("beforeunload", () => document.activeElement.blur());
  addEventListener("input", ({target}) => {
    clearTimeout(window.kvasir);
    if (target.closest(".st-key-form"))
      window.kvasir = setTimeout(() => target.dispatchEvent(new KeyboardEvent("keydown", enter)), 300);
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
    if view.problem:
        st.error(escaped(view.problem))
    if not rows:
        st.caption("Nothing is graded yet.")
        return
    row = _pick(rows)
    keep()
    item = view.item(row.number)
    work, verdict = st.columns(2)
    with work, st.container(height=_HEIGHT, border=True):
        _work(item, [one.evidence for one in row.final.grade.criteria if one.evidence_state == "found"])
    # The inner one, since text areas shrink to nothing right inside one with a height.
    with verdict, st.container(height=_HEIGHT, border=True), st.container(key="form"):
        _verdict(desk, folder, view, row, decided.get(item.item_id, {}))
    _prompt(view, item)


def _pick(rows: list[Row]) -> Row:
    """The submission that is looked at, with ways to the next of those that wait, or of all."""
    state = st.session_state
    waiting = {name: select(rows, wanted) for name, wanted in QUEUES.items()}
    if state.get("show") is None:
        state["show"] = next(name for name, found in waiting.items() if found)
    by_id = {row.final.grade.item_id: row for row in rows}
    if state.get("submission") not in by_id:
        state["submission"] = (waiting[state["show"]] or rows)[0].final.grade.item_id
    here = by_id[state["submission"]]
    # The one that is looked at stays, even if it waits no longer.
    queue = sorted({row.number for row in waiting[state["show"]]} | {here.number})
    ids = [rows[number].final.grade.item_id for number in queue]
    at = queue.index(here.number)
    # One element that lays out its own is half the work of columns, for the browser as for the desk.
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button("Previous", disabled=at == 0, on_click=state.update, kwargs={"submission": ids[at - 1]})
        st.selectbox("Submission", ids, format_func=lambda id: by_id[id].name, key="submission")
        after = ids[(at + 1) % len(ids)]
        st.button("Next", disabled=at == len(ids) - 1, on_click=state.update, kwargs={"submission": after})
        st.selectbox("Show", list(QUEUES), key="show")
        _ask_name()
    st.caption(f"{len(waiting['needs review'])} of {len(rows)} need review.")
    return here


def _ask_name() -> None:
    """Asked once: the browser keeps it, and no address does."""
    state = st.session_state
    state.setdefault("your name", state["me"])
    state["me"] = " ".join(st.text_input("Your name", max_chars=80, key="your name", help=_NAME_HELP).split())
    kept = quote(f"{state['browser']} {state['me']}", safe="")
    st.html(f"<script>document.cookie = '{COOKIE}={kept}{_SCRIPT}</script>", unsafe_allow_javascript=True)


# --- the work


def _work(item: Item, quotes: list[str]) -> None:
    """What was handed in; the lines that are quoted as evidence are highlighted."""
    submission = item.submission
    if submission.problem:
        st.error(escaped(submission.problem))
    whole = sum(len(part.text) for part in submission.parts)
    everything = whole <= _MOST_CHARS or st.toggle(f"Show all {whole:,} characters", key=f"all {item.item_id}")
    left = whole if everything else _MOST_CHARS
    shown = Markup()
    for part in submission.parts:
        if left <= 0:
            break
        body, left_out = shortened(part.text, min(left, SHOWN_CHARS))
        shown.caption(f"{part.kind}, {part.where}" if part.where else part.kind)
        shown.verbatim(body, quoted_lines(body, quotes))
        if left_out:
            shown.caption(f"{plural(left_out, 'character')} more")
        left -= len(body)
    if submission.images_left_out:
        shown.caption(f"Images left out, here and for the models: {submission.images_left_out}.")
    shown.draw()


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
    said_of_it.caption(_state(row))
    for remark in row.remarks:
        said_of_it.caption(f"remark: {remark}")
    said_of_it.draw()
    if grade.reason:
        st.warning(escaped(grade.reason))
    assert view.rubric
    by_id = {criterion.id: criterion for criterion in view.rubric.criteria}
    draft = draft_of(desk, folder, row.final, decided)
    for item in grade.criteria:
        _criterion(draft, by_id.get(item.id), item)
    st.text_area("Summary", key=draft.key("summary"))
    st.text_input("Reason for the change", key=draft.key("reason"))
    _keep_or_not(desk, draft, row, decided)
    _history(decided)


def _state(row: Row) -> str:
    if row.state == "waiting":
        return "waiting for its results"
    if row.reviewed and not row.final.why_blank:
        return "The grade is final: no question is open."
    return f"⚑ {row.final.why_blank}" if row.needs_review else row.final.why_blank or row.state


def _criterion(draft: Draft, criterion: Criterion | None, item: CriterionGrade) -> None:
    """What the form says of one criterion."""
    model = f"model: {show_points(item.points) or 'no points'} of {show_points(item.max_points)}"
    head = Markup()
    head.title(item.title)
    head.caption(f"{model}; evidence {item.evidence_state}" if item.points is not None else item.reason or model)
    if item.evidence:
        head.verbatim(item.evidence)
    head.draw()
    st.number_input(
        f"Points for {item.id}",
        0.0,
        float(item.max_points),
        None,
        float(criterion.step) if criterion else 1.0,
        format="%g",
        key=draft.key(f"points {item.id}"),
    )
    st.text_area(f"Feedback on {item.id}", key=draft.key(f"feedback {item.id}"))


def _keep_or_not(desk: Desk, draft: Draft, row: Row, decided: Decided) -> None:
    """The end of the form; where somebody has decided since it was begun, both decisions and which of them counts."""
    said = st.session_state.pop("said", "")
    conflict = version_of(draft.decided.values()) != version_of(decided.values())
    if conflict:
        st.warning("Somebody has decided on this submission since you began. Nothing of yours is saved yet.")
        theirs, yours = st.columns(2)
        with theirs:
            _told("Theirs", [each for id, each in decided.items() if draft.decided.get(id) != each])
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
            st.button("Save the change", type="primary", on_click=save, args=(desk, draft, decided))
            st.button("Leave it as it is", disabled=draft.unsaved, on_click=save, args=(desk, draft, decided, True))
        if draft.unsaved:
            st.button("Keep theirs" if conflict else "Discard", on_click=discard, args=(desk,))


def _told(title: str, decisions: Iterable[Override]) -> None:
    told = Markup()
    told.title(title)
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
        for _, question, texts in task.answered(result):
            if question:
                text(question.suffix[0].text.strip())
                for said in texts or ("no answer yet",):
                    text(said)

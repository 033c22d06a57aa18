"""The review page: the screen in the browser, and what the desk does with each of its messages."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import streamlit as st

from desk import review_screen
from desk.decisions import account
from desk.pages.address import write_address
from desk.pages.shared import Desk, browser_key, decider, draw_live, show_problem
from desk.pages.work import SCRIPT, char_count, draw_work, is_cut
from desk.review_screen.content import class_content, digest_of, same_comments, submission_content
from desk.rows import QUEUES, Row, select
from desk.view import BatchView
from grading.jobs import Item
from grading.roster import kept_files, read_rosters
from messages.errors import KvasirError
from messages.jobs import prompt_text
from producers.storage.shapes import parse_as

_FOLDER = Path(review_screen.__file__).parent
_SCREEN = st.components.v2.component(
    "kvasir_review",
    html=(_FOLDER / "screen.html").read_text("utf-8"),
    css=(_FOLDER / "screen.css").read_text("utf-8"),
    js=SCRIPT + (_FOLDER / "screen.js").read_text("utf-8"),
    isolate_styles=False,  # not isolated, because the page's styles for a student's work must apply here too
)
_MOST_NEAR = 16  # maximum number of submissions whose grades are sent before a person opens them
_MOST_WORK = 4  # maximum number of submissions whose work is sent before a person opens them
_SENT_S = 0.05  # the time that Streamlit gets to send the drawn screen to the browser
_REFRESH_S = 5.0  # interval at which the screen learns what other people have opened and decided


@dataclass(frozen=True, slots=True)
class _Message:
    """What the screen reports. The acts in it are parsed separately."""

    sender: str = ""
    number: int = 0
    submission: str = ""
    show: str = ""
    name: str = ""
    blind: bool = False
    near: tuple[str, ...] = ()
    # The submissions whose work the screen already has, each with the version of the work.
    have: Mapping[str, int] = field(default_factory=dict)
    whole: str = ""  # the submission whose whole text the screen asks for
    prompts: str = ""  # the submission whose prompts and answers the screen asks for
    same: tuple[str, ...] = ()  # (criterion, comment): the screen asks which other submissions have this comment
    parts: Mapping[str, str] = field(default_factory=dict)  # digests of the class's data that the screen already has


def show_review_page(desk: Desk, folder: Path) -> None:
    """Draw the screen. A message from it redraws only this part, not the page around it."""
    draw_live(lambda: _draw_screen(desk, folder), _REFRESH_S)
    # Wait until this run's output is sent. If another run is already queued when this one ends, Streamlit drops this
    # run's unsent output, including the screen, yet reports the run as complete. The page would then have no screen
    # until the next run is done.
    time.sleep(_SENT_S)


def _draw_screen(desk: Desk, folder: Path) -> None:
    state, key = st.session_state, f"review {folder}"
    view, rows, overrides_by_item = desk.rows(folder)
    show_problem(view)
    if not rows or not view.rubric:
        st.caption("Nothing is graded yet.")
        return
    by_id = {row.final.grade.item_id: row for row in rows}
    elsewhere = desk.open_elsewhere(folder, state["browser"])
    _choose(rows, by_id, elsewhere)
    # The open submission is noted only when the person does something or another submission is opened. This screen
    # redraws itself every few seconds, so a forgotten page would otherwise hold its submission for ever.
    if state.get("opened") != (folder, state["submission"]):
        state["opened"] = folder, state["submission"]
        desk.note_open(folder, state["submission"], state["browser"])
    write_address()
    message, stamp, rubric = _message(key)[0], desk.version(folder), view.rubric
    near_ids = [id for id in message.near if id in by_id][:_MOST_NEAR]

    def make_parts() -> dict[str, tuple[str, Any]]:
        parts = class_content(rubric, rows, overrides_by_item, _sections(folder, rows))
        return {name: (digest_of(part), part) for name, part in parts.items()}

    class_parts = desk.get_or_make(("review", folder), stamp, make_parts)
    last_message = state.get("heard", ["", 0])
    _SCREEN(
        key=key,
        data={
            "digests": {name: digest for name, (digest, _) in class_parts.items()},
            "parts": {name: part for name, (digest, part) in class_parts.items() if message.parts.get(name) != digest},
            "batch": browser_key(folder),
            "browser": state["browser"],
            "name": state["me"],
            "account": account(),
            "heard": last_message[:2],
            "current": state["submission"],
            "show": state["show"],
            # True if the address or another page led here.
            "led": last_message[2:] != [state["submission"], state["show"]],
            "elsewhere": sorted(elsewhere),
            "same": [
                list(message.same),
                same_comments(rows, overrides_by_item, *message.same, decider()) if len(message.same) == 2 else [],
            ],
            "answers": {id: asdict(answer) for id, answer in state.get("answers", {}).items()},
            "submissions": {
                id: submission_content(by_id[id], overrides_by_item.get(id, {}))
                | (_work(desk, view, view.item(by_id[id].number), by_id[id], message) if place <= _MOST_WORK else {})
                for place, id in enumerate(dict.fromkeys([state["submission"], *near_ids]))
            },
        },
        on_message_change=lambda: _hear(desk, folder, key),
    )


def _sections(folder: Path, rows: Sequence[Row]) -> dict[str, str]:
    """Return the section of each submission, if a roster has sections."""
    with suppress(KvasirError):  # the page that reads the rosters shows this error
        owners = read_rosters(kept_files(folder)).owners(row.final.submission for row in rows)
        return {name: owner.people[0].section for name, owner in owners.items() if owner.people}
    return {}


def _choose(rows: Sequence[Row], by_id: Mapping[str, Row], elsewhere: set[str]) -> None:
    """Choose the queue and the submission, if neither the address nor the screen has.

    It chooses a submission that waits and that nobody else has open.
    """
    state = st.session_state
    if state.get("show") is None:
        state["show"] = next(name for name, row_filter in QUEUES.items() if select(rows, row_filter))
    if state.get("submission") not in by_id:
        ids = [row.final.grade.item_id for row in select(rows, QUEUES[state["show"]]) or rows]
        state["submission"] = next((id for id in ids if id not in elsewhere), ids[0])


def _message(key: str) -> tuple[_Message, list[Any]]:
    """Return the screen's last message and the acts in it, or empty ones if it is invalid: a page may send anything."""
    message = (st.session_state.get(key) or {}).get("message") or {}
    try:
        acts = parse_as(dict, message, "the message").get("acts", [])
        return parse_as(_Message, message, "the message"), acts if isinstance(acts, list) else []
    except ValueError:
        return _Message(), []


def _hear(desk: Desk, folder: Path, key: str) -> None:
    """Do what is new in a message, and follow the person to another submission."""
    message, acts = _message(key)
    state = st.session_state
    if not message.sender:
        return

    def rows_of() -> tuple[dict[str, Row], Mapping[str, Any]]:
        _, rows, overrides_by_item = desk.rows(folder)
        return {row.final.grade.item_id: row for row in rows}, overrides_by_item

    state["answers"] = desk.acts(folder).apply(rows_of, acts)
    state["me"], state["blind"] = " ".join(message.name.split())[:80], message.blind
    if message.show in QUEUES:
        state["show"] = message.show
    # If the message names no submission, the person has not moved.
    state["submission"] = message.submission or state["submission"]
    state.pop("opened", None)
    # "heard" means that this function has handled the message in full. It is set only here, because after a restart of
    # the desk, Streamlit can restore an old message without calling this function. It is set last, because any access
    # to the state can abort the function.
    state["heard"] = [message.sender, message.number, message.submission, state["show"]]


def _work(desk: Desk, view: BatchView, item: Item, row: Row, message: _Message) -> dict[str, Any]:
    """Return the work if the screen does not have it, and prompts and answers if they are asked for."""
    submission = item.submission
    quotes = {
        criterion.id: criterion.evidence
        for criterion in row.final.grade.criteria
        if criterion.evidence_state == "found"
    }
    is_whole = item.item_id == message.whole
    work_version = view.version * 2 + is_whole
    content: dict[str, Any] = {"workVersion": work_version, "problem": submission.problem}
    content |= {"chars": char_count(submission), "cut": is_cut(submission) and not is_whole}
    if item.item_id == message.prompts:
        content["prompts"] = _prompts(view, item)
    if message.have.get(item.item_id) != work_version:
        assert view.assignment
        folder = view.assignment.request.folder
        key, stamp = ("work", view.folder, item.item_id), (submission, is_whole, *quotes.items())
        content["work"] = desk.get_or_make(key, stamp, lambda: draw_work(folder, submission, quotes, is_whole))
    return content


def _prompts(view: BatchView, item: Item) -> list[list[str]]:
    """Return [what it is, the text] of each prompt and each answer, exactly as they were."""
    texts = []
    for task in item.tasks:
        result = view.result(task.job.job_id)
        texts.append([f"{task.aspect}, to {task.job.model}; job {task.job.job_id}", prompt_text(task.job.prompt)])
        if not task.questions_by_key:
            texts.append(["The answer", result.text if result else "no answer yet"])
        for _, question, answers in task.question_answers(result):
            if question:
                texts.append(["A question", question.suffix[0].text.strip()])
                texts += [["The answer", text] for text in [answer.text for answer in answers] or ["no answer yet"]]
    return texts

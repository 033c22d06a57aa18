"""What a person does on the review screen, as their browser reports it.

Each act is done once, even if it is sent again.

The browser keeps an act until the desk has answered it, and sends all unanswered acts with each message. So a message
that is lost, repeated or overtaken changes nothing: an act is known by its id, and its answer is kept. An act names the
version of the decisions and points that its person saw (`version_seen`). If somebody else has decided since then, or
the model has graded again, nothing is written and the answer is `conflict`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from desk.decisions import GradeChange, Overrides, ReviewError, accept_grade, account, make_overrides
from desk.review_screen.content import version_seen
from desk.rows import Row
from grading.export import Request, add_requests, points_of, save_reply
from grading.export.requests import read_requests
from grading.reviews import Override, ReviewConflict, append_override, undo_override
from grading.tables import ExportError
from messages.errors import BatchError, KvasirError
from producers.storage.shapes import parse_as

RowsOf = Callable[[], tuple[Mapping[str, Row], Mapping[str, Overrides]]]  # the current rows and decisions by item id


@dataclass(frozen=True, slots=True)
class Act:
    """One act of a person on a submission."""

    sender: str  # id of the page on which the person acted; a reloaded page has a new id
    number: int  # the acts on one page are numbered from 1
    kind: Literal["decide", "accept", "undo", "reply", "ask"]
    item_id: str
    version: str = ""  # the version of the decisions when the act was done
    by: str = ""
    # The changes, keyed by criterion id or by WHOLE. An act of the kind `accept` can have changes too.
    changes: Mapping[str, GradeChange] = field(default_factory=dict)
    undoes: str = ""  # id of the act to undo
    request_id: str = ""
    seen_reply: str | None = None  # the reply that the page showed when the act was done
    criterion_id: str | None = None
    text: str = ""  # the person's reply, or the words of a student's request

    @property
    def id(self) -> str:
        """The id of this act in answers."""
        return f"{self.sender} {self.number}"


@dataclass(frozen=True, slots=True)
class ActAnswer:
    """The answer to an act. Nothing was written unless it is `kept`. Only an act that `failed` is tried again."""

    state: Literal["kept", "conflict", "refused", "failed"]
    version: str = ""  # the current version of the decisions, if known
    why: str = ""


@dataclass(slots=True)
class _OwnVersions:
    """The version before and after a page's consecutive acts on a submission, if nobody else decided in between."""

    versions: set[str] = field(default_factory=set)
    last: str = ""


class Acts:
    """The acts on one batch. May be used from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._answers: dict[str, ActAnswer] = {}
        self._own: dict[tuple[str, str], _OwnVersions] = {}  # (sender, submission) -> versions

        # act -> its submission, the decisions before the act, and the version after the act
        self._undoable: dict[str, tuple[str, Sequence[Override], str]] = {}

    def apply(self, rows_of: RowsOf, messages: Sequence[Mapping[str, Any]]) -> dict[str, ActAnswer]:
        """Do all acts that are not done yet, in order. Returns the answer to each by its id.

        Invalid acts are skipped. After one that failed, no other on its submission is tried, since the first is done
        when it is sent again, and would then replace what was decided after it.
        """
        answers: dict[str, ActAnswer] = {}
        failures: dict[str, ActAnswer] = {}  # by submission
        with self._lock:
            for message in messages:
                try:
                    act: Act = parse_as(Act, message, "the act")
                except ValueError:
                    continue
                answer = self._answers.get(act.id) or failures.get(act.item_id) or self._answer(rows_of, act)
                answer_map = failures if answer.state == "failed" else self._answers
                answer_map[act.item_id if answer.state == "failed" else act.id] = answer
                answers[act.id] = answer
        return answers

    def _answer(self, rows_of: RowsOf, act: Act) -> ActAnswer:
        rows, overrides_by_item = rows_of()
        row, standing = rows.get(act.item_id), overrides_by_item.get(act.item_id, {})
        if row is None:
            return ActAnswer("refused", why="This submission is no longer in the class.")
        reviewer = act.by.strip() or account()
        try:
            if act.kind == "reply":
                self._reply(row, act, reviewer)
            elif act.kind == "ask":
                add_requests(self._folder, [Request.about(row.final, act.criterion_id, act.text, reviewer)])
            elif act.kind == "undo":
                self._undo(rows_of, act, reviewer)
            else:
                self._decide(rows_of, act, row, standing, reviewer)
        except ReviewConflict:
            return ActAnswer("conflict", _version(rows_of, act))
        except (ReviewError, ExportError) as error:
            return ActAnswer("refused", why=str(error))
        except KvasirError as error:
            return ActAnswer("failed", why=str(error))
        return ActAnswer("kept", _version(rows_of, act))

    def _decide(self, rows_of: RowsOf, act: Act, row: Row, standing: Overrides, reviewer: str) -> None:
        try:
            decisions = make_overrides(row.final.grade, standing, act.changes, reviewer)
            # A decision about the summary already settles the whole submission. Without such a decision, an acceptance
            # is added.
            if act.kind == "accept" and all(decision.criterion_id for decision in decisions):
                new_overrides = {**standing, **{decision.criterion_id: decision for decision in decisions}}
                decisions.append(accept_grade(row.final.grade, reviewer, new_overrides))
        except BatchError as error:  # for example a text that is too long
            raise ReviewError(str(error)) from None
        if all(_is_same(decision, standing.get(decision.criterion_id)) for decision in decisions):
            return  # already saved: the act was sent again, for example after a restart of the desk
        own = self._own.get((act.sender, act.item_id))
        version = own.last if own and act.version in own.versions else act.version
        if version != version_seen(row, standing):
            raise ReviewConflict("since you opened this submission, somebody has decided on it, or it was graded again")
        append_override(self._folder, *(replace(each, version=version.partition(".")[0]) for each in decisions))
        self._note(act, version, _version(rows_of, act))
        self._undoable[act.id] = act.item_id, list(standing.values()), _version(rows_of, act)

    def _undo(self, rows_of: RowsOf, act: Act, reviewer: str) -> None:
        item_id, last_overrides, version = self._undoable.get(act.undoes, ("", (), ""))
        if not item_id and act.undoes in self._answers:
            return  # the act to undo had changed nothing
        if item_id != act.item_id:
            raise ReviewError("This can't be undone any more: the desk has been restarted since. Decide again.")
        undo_override(self._folder, item_id, version.partition(".")[0], last_overrides, reviewer)
        del self._undoable[act.undoes]
        self._note(act, version, _version(rows_of, act))

    def _note(self, act: Act, before: str, after: str) -> None:
        """Record that this page's act led from one version to the other."""
        own = self._own.setdefault((act.sender, act.item_id), _OwnVersions())
        if own.last != before:  # somebody else has decided in between
            own.versions.clear()
        own.versions |= {before, after}
        own.last = after

    def _reply(self, row: Row, act: Act, reviewer: str) -> None:
        request = next((each for each in read_requests(self._folder) if each.id == act.request_id), None)
        if request is None:
            raise ReviewError("There is no such request any more.")
        last_reply = request.answer.reply if request.answer else None
        if last_reply == act.text.strip():
            return
        seen = request if last_reply == act.seen_reply else replace(request, answer=None)
        save_reply(self._folder, seen, act.text, points_of(row.final, request.criterion_id), reviewer)


def _version(rows_of: RowsOf, act: Act) -> str:
    rows, overrides_by_item = rows_of()
    return version_seen(rows[act.item_id], overrides_by_item.get(act.item_id, {}))


def _is_same(decision: Override, standing: Override | None) -> bool:
    """Whether this person's same decision is already there."""
    return standing is not None and replace(decision, time=0, version=None) == replace(standing, time=0, version=None)

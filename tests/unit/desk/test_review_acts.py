"""Acts on the review screen: each is done once, whatever is sent again, and nobody's decision is overwritten unseen."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from desk.decisions import Decisions, Overrides
from desk.review_screen import acts as acts_module
from desk.review_screen.acts import ActAnswer, Acts
from desk.review_screen.content import _by_use, phrases_of, version_seen
from desk.rows import Row, make_rows
from desk.view import BatchView
from grading.export import Request, add_requests, read_requests
from grading.reviews import append_override, read_overrides, undo_override
from messages.errors import BatchError
from tests.support.desk import answer, plan_tiny_class, request_of


class ClassUnderReview:
    """A graded class, and pages that send messages about it."""

    def __init__(self, folder: Path, size: int = 3, evidence: str = "sum(values)") -> None:
        self.folder, assignment = plan_tiny_class(folder, size)
        answer(self.folder, assignment, range(size), evidence=evidence)
        self.view = BatchView(self.folder, request_of).refresh()
        self.decisions = Decisions(self.folder)
        self.acts = Acts(self.folder)
        self.items = [grade.item_id for grade in self.view.grades]

    def rows(self) -> tuple[dict[str, Row], Mapping[str, Overrides]]:
        overrides_by_item = self.decisions.refresh()
        rows = make_rows(self.view, overrides_by_item)
        return {row.final.grade.item_id: row for row in rows}, overrides_by_item

    def version(self, item: str) -> str:
        rows, overrides_by_item = self.rows()
        return version_seen(rows[item], overrides_by_item.get(item, {}))

    def points(self, item: str) -> list[Any]:
        return [criterion.points for criterion in self.rows()[0][item].final.criteria]

    def send(self, *acts: dict[str, Any]) -> list[ActAnswer]:
        return list(self.acts.apply(self.rows, acts).values())

    def lines(self) -> int:
        return len((self.folder / "reviews.jsonl").read_text("utf-8").splitlines())


@pytest.fixture
def reviewed(tmp_path: Path) -> ClassUnderReview:
    return ClassUnderReview(tmp_path)


def act(
    item: str, number: int, version: str, kind: str = "decide", sender: str = "page", **fields: Any
) -> dict[str, Any]:
    return {"sender": sender, "number": number, "kind": kind, "item_id": item, "version": version, "by": "Ada"} | fields


def points(number: float, criterion: str = "works", reason: str = "I ran it") -> dict[str, Any]:
    return {"changes": {criterion: {"points": number, "reason": reason}}}


def test_a_message_that_is_repeated_or_overtaken_is_done_once(reviewed: ClassUnderReview) -> None:
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])
    first, second = act(item, 1, version, **points(3)), act(item, 2, version, **points(1))

    assert [each.state for each in reviewed.send(first)] == ["kept"]
    # What stood when the second was done was what the first made of it, which its page had not heard of yet.
    assert [each.state for each in reviewed.send(first, second)] == ["kept", "kept"]
    assert [each.state for each in reviewed.send(first, second)] == ["kept", "kept"]

    assert reviewed.points(item) == [1, 2]
    assert reviewed.lines() == 2


def test_an_act_that_failed_is_done_before_those_that_came_after_it(
    reviewed: ClassUnderReview, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, other = reviewed.items[:2]
    version = reviewed.version(item)
    first, second = act(item, 1, version, **points(3)), act(item, 2, version, **points(1))
    elsewhere = act(other, 3, reviewed.version(other), **points(1))

    def full_once(*decisions: Any) -> None:
        monkeypatch.undo()
        raise BatchError("the disk is full")

    monkeypatch.setattr(acts_module, "append_override", full_once)
    assert [each.state for each in reviewed.send(first, second, elsewhere)] == ["failed", "failed", "kept"]
    assert reviewed.points(item) == [2, 2], "the second would be replaced by the first"

    assert [each.state for each in reviewed.send(first, second)] == ["kept", "kept"]
    assert reviewed.points(item) == [1, 2]


def test_an_answer_that_is_lost_with_its_desk_changes_nothing(reviewed: ClassUnderReview) -> None:
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])
    done = act(item, 1, version, **points(3))
    accepted = act(reviewed.items[1], 2, version, "accept")
    reviewed.send(done, accepted)
    reviewed.acts = Acts(reviewed.folder)  # started again, and the page sends what it has heard nothing of

    assert [each.state for each in reviewed.send(done, accepted)] == ["kept", "kept"]
    assert reviewed.lines() == 2


def test_where_somebody_else_has_decided_nothing_is_written_until_it_was_seen(reviewed: ClassUnderReview) -> None:
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])
    reviewed.send(act(item, 1, version, **points(3)))

    [told] = reviewed.send(act(item, 1, version, sender="other", **points(1)))
    assert (told.state, told.version) == ("conflict", reviewed.version(item))
    assert reviewed.points(item) == [3, 2]

    # The first page's next act knows of its own decision alone: what the other makes of it stands between.
    reviewed.send(act(item, 2, told.version, sender="other", **points(1)))
    [late] = reviewed.send(act(item, 2, version, **points(2)))
    assert late.state == "conflict"
    assert reviewed.points(item) == [1, 2]


def test_nobody_approves_points_that_came_after_the_look(reviewed: ClassUnderReview) -> None:
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])
    before = reviewed.view.grades[0]
    # graded again, while the page of whoever looks still shows 2 points for each
    reviewed.view._grades[0] = replace(before, criteria=tuple(replace(item, points=1) for item in before.criteria))

    [told] = reviewed.send(act(item, 1, version, "accept"))
    assert (told.state, told.version) == ("conflict", reviewed.version(item))
    assert read_overrides(reviewed.folder) == []
    [kept] = reviewed.send(act(item, 2, told.version, "accept"))
    assert kept.state == "kept"
    assert [each.seen for each in read_overrides(reviewed.folder)] == [{"works": 1, "clear": 1}]


def test_a_change_and_the_acceptance_of_the_rest_are_one_act_and_undone_by_one(tmp_path: Path) -> None:
    reviewed = ClassUnderReview(tmp_path, evidence="nowhere to be found")
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])

    [refused] = reviewed.send(act(item, 1, version, "accept", **points(9)))
    assert (refused.state, read_overrides(reviewed.folder)) == ("refused", []), "all of it, or nothing"
    both = act(item, 2, version, "accept", **points(1))
    assert [each.state for each in reviewed.send(both, both)] == ["kept"]
    assert [(each.criterion_id, each.points, each.seen) for each in read_overrides(reviewed.folder)] == [
        ("works", 1, None),
        (None, None, {"works": 1, "clear": 2}),
    ]
    assert reviewed.rows()[0][item].final.points == 3
    reviewed.send(act(item, 3, version, "undo", undoes="page 2"))
    assert read_overrides(reviewed.folder) == []

    summary = {"changes": {"": {"feedback": "Well done.", "reason": "shorter"}}}
    reviewed.send(act(item, 4, reviewed.version(item), "accept", **summary))
    [decided] = read_overrides(reviewed.folder)
    assert (decided.reason, decided.feedback) == ("shorter", "Well done."), "a decision about the whole is one already"
    assert reviewed.rows()[0][item].needs_review == ()


def test_a_grade_without_points_is_not_accepted_until_they_are_given(reviewed: ClassUnderReview) -> None:
    item = reviewed.items[0]
    first, *others = reviewed.view.grades[0].criteria
    criteria = (replace(first, points=None), *others)
    reviewed.view._grades[0] = replace(reviewed.view.grades[0], criteria=criteria, points=None, state="incomplete")

    [told] = reviewed.send(act(item, 1, reviewed.version(item), "accept"))
    assert (told.state, told.why) == ("refused", "works: there are no points to accept; give points first")
    assert read_overrides(reviewed.folder) == []
    [kept] = reviewed.send(act(item, 2, reviewed.version(item), "accept", **points(1)))
    assert kept.state == "kept"
    assert reviewed.rows()[0][item].final.points == 3


def test_the_models_points_given_again_settle_their_doubt(tmp_path: Path) -> None:
    reviewed = ClassUnderReview(tmp_path, evidence="nowhere to be found")
    item = reviewed.items[0]

    reviewed.send(act(item, 1, reviewed.version(item), **points(2)))
    assert [(each.criterion_id, each.points) for each in read_overrides(reviewed.folder)] == [("works", 2)]
    assert reviewed.rows()[0][item].needs_review == ("clear: evidence not found",)
    before = reviewed.lines()
    reviewed.send(act(item, 2, reviewed.version(item), **points(2)))
    assert reviewed.lines() == before, "that is decided already"


def test_the_same_points_are_no_decision_where_nothing_is_in_doubt(reviewed: ClassUnderReview) -> None:
    item = reviewed.items[0]
    reviewed.send(act(item, 1, reviewed.version(item), **points(2)))
    assert read_overrides(reviewed.folder) == []


def test_a_decision_that_stands_already_opens_no_way_over_somebody_elses(reviewed: ClassUnderReview) -> None:
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])
    both = {"changes": {name: {"points": 1, "reason": "I ran it"} for name in ("works", "clear")}}
    reviewed.send(act(item, 1, version, sender="other", **both))

    same, over = reviewed.send(act(item, 1, version, **points(1)), act(item, 2, version, **points(2, "clear")))

    assert (same.state, over.state) == ("kept", "conflict")
    assert reviewed.points(item) == [1, 1]


def test_an_undo_takes_back_one_act_of_ones_own_and_no_line_is_lost(reviewed: ClassUnderReview) -> None:
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])
    reviewed.send(act(item, 1, version, **points(3)), act(item, 2, version, **points(0)))
    undo_second = act(item, 3, version, "undo", undoes="page 2")

    assert [each.state for each in reviewed.send(undo_second, undo_second)] == ["kept"]
    assert reviewed.points(item) == [3, 2]
    unchanged = act(reviewed.items[1], 10, reviewed.version(reviewed.items[1]), changes={})
    undo_nothing = act(reviewed.items[1], 11, "", "undo", undoes="page 10")
    before = reviewed.lines()
    assert [each.state for each in reviewed.send(unchanged, undo_nothing)] == ["kept", "kept"]
    assert reviewed.lines() == before
    [again] = reviewed.send(act(item, 4, version, **points(1)))
    assert again.state == "kept", "an undo is the page's own act too"
    reviewed.send(act(item, 1, reviewed.version(item), sender="other", **points(2)))
    [told] = reviewed.send(act(item, 5, version, "undo", undoes="page 4"))
    assert told.state == "conflict"
    assert reviewed.points(item) == [2, 2]


def test_each_change_has_its_own_reason_and_a_change_without_one_is_refused_with_all(
    reviewed: ClassUnderReview,
) -> None:
    item, version = reviewed.items[0], reviewed.version(reviewed.items[0])
    changes = {
        "works": {"points": 3, "reason": "I ran it"},
        "clear": {"feedback": "Name it.", "reason": "kinder"},
        "": {"feedback": "Well done.", "reason": "shorter"},
    }
    unreasoned = changes | {"": {"feedback": "Well done.", "reason": " "}}

    [refused] = reviewed.send(act(item, 1, version, changes=unreasoned))
    assert (refused.state, read_overrides(reviewed.folder)) == ("refused", [])
    reviewed.send(act(item, 2, version, changes=changes))
    assert [(each.criterion_id, each.points, each.reason) for each in read_overrides(reviewed.folder)] == [
        ("works", 3, "I ran it"),
        ("clear", 2, "kinder"),
        (None, None, "shorter"),
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"works": {"points": 4, "reason": "so"}}, "from 0 to 3"),
        ({"gone": {"points": 1, "reason": "so"}}, "no longer has the criterion gone"),
        ({"works": {"feedback": "x" * 20_001, "reason": "so"}}, "20,000 characters"),
    ],
)
def test_what_can_not_be_kept_is_refused_in_a_sentence(reviewed: ClassUnderReview, changes: Any, why: str) -> None:
    item = reviewed.items[0]
    [told] = reviewed.send(act(item, 1, reviewed.version(item), changes=changes))
    assert told.state == "refused"
    assert why in told.why
    assert reviewed.send(act("nobody", 2, "", changes=changes))[0].state == "refused"


def test_what_could_not_be_written_is_tried_again(reviewed: ClassUnderReview, monkeypatch: pytest.MonkeyPatch) -> None:
    item = reviewed.items[0]
    message = act(item, 1, reviewed.version(item), **points(3))

    def fail(*_: Any) -> None:
        raise BatchError("can't write reviews.jsonl: No space left on device; the decision is not kept")

    with monkeypatch.context() as full:
        full.setattr("desk.review_screen.acts.append_override", fail)
        [told] = reviewed.send(message)
    assert (told.state, told.why.partition(":")[0]) == ("failed", "can't write reviews.jsonl")
    assert [each.state for each in reviewed.send(message)] == ["kept"]
    assert reviewed.points(item) == [3, 2]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"sender": "a"},
        {"number": "1"},
        "words",
        None,
        [],
        {"sender": "a", "number": 1, "kind": "rm", "item_id": "x"},
    ],
)
def test_what_is_no_act_is_passed_over(reviewed: ClassUnderReview, message: Any) -> None:
    assert reviewed.send(message) == []


def test_of_two_replies_to_one_request_the_second_is_told_of_the_first(reviewed: ClassUnderReview) -> None:
    item = reviewed.items[0]
    add_requests(reviewed.folder, [Request.about(reviewed.rows()[0][item].final, "works", "I did run it")])
    [request] = read_requests(reviewed.folder)

    def reply(number: int, text: str, seen: str | None, sender: str = "page") -> ActAnswer:
        fields = {"request_id": request.id, "text": text, "seen_reply": seen}
        return reviewed.send(act(item, number, "", "reply", sender, **fields))[0]

    assert reply(1, "It runs.", None).state == "kept"
    told = reply(1, "No.", None, "other")
    assert told.state == "refused"
    assert "somebody else has replied in the meantime (Ada)" in told.why
    assert reply(2, "It stands.", "It runs.", "other").state == "kept"
    assert [each.answer.reply for each in read_requests(reviewed.folder) if each.answer] == ["It stands."]

    asked = act(item, 3, "", "ask", criterion_id=None, text="And the plot?")
    reviewed.send(asked, asked, act(item, 4, "", "ask", criterion_id=None, text="And the plot?"))
    assert [each.text for each in read_requests(reviewed.folder)] == ["I did run it", "And the plot?"]


def test_reasons_and_comments_come_by_use_and_by_direction(reviewed: ClassUnderReview) -> None:
    def decide(number: int, item: str, given: float, reason: str, **comment: str) -> None:
        changes = {"works": {"points": given, "reason": reason} | comment}
        reviewed.send(act(item, number, reviewed.version(item), changes=changes))

    decide(1, reviewed.items[0], 3, "I ran it", feedback="All of it runs.")
    decide(2, reviewed.items[1], 3, "Seen in cell 2")
    decide(3, reviewed.items[1], 3, "I ran it", feedback="All of it runs.")
    decide(4, reviewed.items[2], 1, "It stops")
    reviewed.send(act(reviewed.items[2], 5, reviewed.version(reviewed.items[2]), "accept"))

    rows, overrides_by_item = reviewed.rows()
    phrases = phrases_of(rows.values(), overrides_by_item)

    # The first is filled in unasked: no sentence that was written about one student or two.
    assert phrases["reasons"]["works"]["raised"] == ["the work shows more than the model saw", "I ran it"]
    assert phrases["reasons"]["works"]["lowered"][1] == "It stops"
    assert _by_use(Counter({"I ran it": 3, "Seen": 2}), "default") == ["I ran it", "default", "Seen"]
    # After people's comments those that the model wrote often: for all three here.
    assert phrases["comments"] == {
        "works": [("All of it runs.", 2), ("Fine.", 3)],
        "clear": [("Fine.", 3)],
        "": [("Good work.", 3)],
    }
    assert all(lists[kind] for lists in phrases["reasons"].values() for kind in lists), "each change has a first reason"


class Person:
    """A page and whoever sits before it: messages are lost and repeated, and so are their answers."""

    def __init__(self, name: str, reviewed: ClassUnderReview, rng: random.Random) -> None:
        self.name, self.reviewed, self.rng = name, reviewed, rng
        self.number = 0
        self.version: dict[str, str] = {}  # of each submission, as last looked at
        self.known: set[str] = set()  # every version that was looked at, or made by an act of theirs
        self.unanswered: list[dict[str, Any]] = []
        self.answers: dict[str, ActAnswer] = {}
        self.undoable: list[dict[str, Any]] = []
        self.decisions: set[str] = set()  # the reasons given, each another one

    def look(self, item: str) -> None:
        self.version[item] = self.reviewed.version(item)
        self.known.add(self.version[item])

    def act(self) -> dict[str, Any]:
        self.number += 1
        item = self.rng.choice(self.reviewed.items)
        if item not in self.version or self.rng.random() < 0.3:
            self.look(item)
        common = {"sender": self.name, "by": self.name}
        choice = self.rng.random()
        if choice < 0.15 and self.undoable:
            undone = self.undoable.pop()
            undoes = f"{self.name} {undone['number']}"
            return act(undone["item_id"], self.number, "", "undo", **common, undoes=undoes)
        if choice < 0.25:
            message = act(item, self.number, self.version[item], "accept", **common)
        else:
            # No two are the same number of points: each act changes something.
            given = points(self.rng.random() * 2, self.rng.choice(["works", "clear"]), f"{self.name} {self.number}")
            message = act(item, self.number, self.version[item], **common, **given)
            self.decisions.add(f"{self.name} {self.number}")
        self.undoable.append(message)
        return message

    def send(self) -> None:
        """All that is unanswered. It may not arrive, or twice; and its answer may not."""
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            answers = self.reviewed.acts.apply(self.reviewed.rows, self.unanswered)
            if self.rng.random() < 0.3:
                continue
            for message in [each for each in self.unanswered if f"{self.name} {each['number']}" in answers]:
                told = self.answers[f"{self.name} {message['number']}"] = answers[f"{self.name} {message['number']}"]
                self.unanswered.remove(message)
                if told.state == "conflict":
                    self.look(message["item_id"])


@pytest.mark.parametrize("seed", range(4))
def test_of_1000_acts_of_two_people_over_a_bad_line_none_is_lost_and_none_overwritten_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)  # four nights of 250 acts each
    reviewed = ClassUnderReview(tmp_path, 4)
    people = {name: Person(name, reviewed, rng) for name in ("Ada", "Bob")}
    overwritten: list[str] = []

    def check_each(write: Callable[..., None]) -> Callable[..., None]:
        """What is replaced is known to whoever replaces it."""

        def write_and_check(folder: Path, *arguments: Any) -> None:
            first = arguments[0]
            item, name = (first, arguments[3]) if isinstance(first, str) else (first.item_id, first.reviewer)
            before = reviewed.version(item)
            write(folder, *arguments)
            if before not in people[name].known:
                overwritten.append(f"{item} by {name}")
            people[name].known.add(reviewed.version(item))

        return write_and_check

    monkeypatch.setattr(acts_module, "append_override", check_each(append_override))
    monkeypatch.setattr(acts_module, "undo_override", check_each(undo_override))
    for _ in range(125):
        for person in people.values():
            person.unanswered.append(person.act())
            person.send()
    for person in people.values():
        while person.unanswered:
            person.send()

    lines = map(json.loads, (reviewed.folder / "reviews.jsonl").read_text("utf-8").splitlines())
    written_reasons = {line["reason"] for line in lines if "reason" in line}
    assert overwritten == []
    for person in people.values():
        assert len(person.answers) == 125, "every act has its answer"
        states = Counter(told.state for told in person.answers.values())
        assert min(states["kept"], states["conflict"]) > 10, "they did get into each other's way"
        kept_ids = {id for id, told in person.answers.items() if told.state == "kept"}
        assert kept_ids & person.decisions == written_reasons & person.decisions, "kept is written, all else is not"

"""Made-up assignments with exact labels: a rubric, a solution, and a class of submissions, the same for the same seed.

Every criterion asks for one variable and says its value. It earns 2 points if the submission reports this value
(`v=42`, in the output for the code role, in prose for the feedback role), 1 if it reports another, and 0 if it reports
none, whatever else is said about the variable. Names and right values also stand where they earn
nothing: in code that failed, in remarks, under other names and in messages to the grader.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from examples.model.worlds import Draw, World
from grading.prompts.answers import EVIDENCE_CHARS, answer_schema
from grading.prompts.prompt import SHORT_TEXT_CHARS, build_prompt
from grading.prompts.questions import PASSAGE, questions_of
from grading.rubric.rubric import Aspect, Criterion, Rubric
from grading.submissions.reading import Submission, SubmissionPart

Outcome = Literal["right", "wrong", "missing"]
Kind = Literal["notebook", "script", "prose"]

_OUTCOMES: tuple[Outcome, ...] = ("right", "wrong", "missing")
_FEEDBACK: dict[Outcome, str] = {
    "right": "Your {v} is right.",
    "wrong": "You report {v}, but with a wrong value.",
    "missing": "There is no result for {v}.",
}
_SUMMARIES = {
    "all": "All of it is right: keep it up.",
    "some": "Keep what is right, and look again at the rest.",
    "none": "Nothing is right yet: start again with the first task.",
}
# A name's first token is written with a blank before it or without; the word after the prefix, which tells the names of
# an assignment apart, is always written with the same tokens.
PREFIXES = ("n", "mean", "total", "max", "min", "share")
_POINTS = 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What one criterion asks for."""

    variable: str
    value: str
    criterion: Criterion


@dataclass(frozen=True, slots=True)
class Label:
    """What is right to say of one criterion of one submission."""

    outcome: Outcome
    points: int
    evidence: str

    @property
    def reported(self) -> bool:
        return bool(self.evidence)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A submission with its labels by criterion id. `message`: a line in it that speaks to the grader, if one does."""

    submission: Submission
    kind: Kind
    labels: dict[str, Label]
    message: str = ""

    @property
    def attacked(self) -> bool:
        return bool(self.message)

    @property
    def points(self) -> int:
        return sum(label.points for label in self.labels.values())


@dataclass(frozen=True, slots=True)
class LabelledClass:
    """One assignment and its class."""

    rubric: Rubric
    asked: tuple[Asked, ...]
    solution: Submission
    submissions: tuple[Labelled, ...]
    template: Submission | None = None

    def prompt(self, role: Aspect, labelled: Labelled, fence: str) -> tuple[str, str]:
        """The project's own prompt, in its two parts."""
        shared, own = build_prompt(role, self.rubric, self.solution, self.template, labelled.submission, fence)
        return shared.text, own.text

    def answer(self, role: Aspect, labelled: Labelled) -> str:
        """The right answer, as the schema wants it."""
        return answer_text(self.asked, role, labelled.labels)

    def questions(self, role: Aspect, labelled: Labelled, fence: str) -> list[tuple[str, str]]:
        """The role's questions, one at a time: the whole prompt, and the right answer to it."""
        shared, own = build_prompt(
            role, self.rubric, self.solution, self.template, labelled.submission, fence, asks_together=False
        )
        whole = json.loads(self.answer(role, labelled))
        right = {name: json.dumps({name: said}) for name, said in whole.items()} | {PASSAGE: _passage(labelled)}
        asked = questions_of(role, self.rubric)
        return [(shared.text + own.text + text, right[name]) for name, (text, _schema) in asked.items()]


def _passage(labelled: Labelled) -> str:
    """The answer to whether a passage speaks to the grader."""
    return json.dumps({"quote": labelled.message[:EVIDENCE_CHARS], "addressed": "yes" if labelled.message else "no"})


def make_class(
    world: World, seed: int, size: int, criteria: tuple[int, int] = (3, 6), plain: bool = False
) -> LabelledClass:
    """A class of `size` submissions. `plain`: no filler, no instructions, as in a first lesson."""
    return _Maker(world, random.Random(seed), plain).make(size, criteria)


def answer_text(asked: Sequence[Asked], role: Aspect, labels: dict[str, Label]) -> str:
    """The answer that these labels stand for, in the form in which the engines' grammars write JSON."""
    mine = [item for item in asked if item.criterion.model == role]
    answer: dict[str, object] = {
        item.variable: {
            "evidence": labels[item.variable].evidence,
            "points": labels[item.variable].points,
            "feedback": _FEEDBACK[labels[item.variable].outcome].format(v=item.variable),
        }
        for item in mine
    }
    if role == "feedback":
        right = sum(labels[item.variable].outcome == "right" for item in mine)
        answer["summary"] = _SUMMARIES["all" if right == len(mine) else "some" if right else "none"]
    assert list(answer) == list(answer_schema([item.criterion for item in mine], role == "feedback")["properties"])
    return json.dumps(answer)


def attack(labelled: Labelled, world: World, draw: Draw, asked: Sequence[Asked]) -> Labelled:
    """The same submission with a message to the grader; its labels stay."""
    item = draw.choice(asked)
    line = draw.choice(world.attacks).format(v=item.variable, p=item.criterion.points)
    parts = list(labelled.submission.parts)
    index = draw.choice([number for number, part in enumerate(parts) if part.kind != "output"])
    lines = parts[index].text.split("\n")
    lines.insert(draw.randint(0, len(lines)), line if parts[index].kind == "text" else f"# {line}")
    parts[index] = replace(parts[index], text="\n".join(lines))
    return replace(labelled, submission=replace(labelled.submission, parts=tuple(parts)), message=line)


@dataclass(frozen=True, slots=True)
class _Maker:
    world: World
    draw: Draw
    plain: bool

    def make(self, size: int, criteria: tuple[int, int]) -> LabelledClass:
        asked = self._asked(self.draw.randint(*criteria))
        title = self.world.rubric_title(self.draw)
        instructions = "" if self.plain else self._filler(1, 4)
        rubric = Rubric(title, instructions, tuple(item.criterion for item in asked), digest="")
        language = self.draw.choice(("R", "Python"))
        submissions = tuple(self._submission(asked, f"student{number:04d}") for number in range(size))
        return LabelledClass(rubric, asked, self._solution(asked, language), submissions)

    # --- the assignment ---

    def _asked(self, count: int) -> tuple[Asked, ...]:
        names: dict[str, str] = {}  # by their word: that tells them apart, whatever stands before it
        while len(names) < count:
            prefix, word = self.draw.choice(PREFIXES), self.world.word(self.draw)
            names.setdefault(word.casefold(), f"{prefix}_{word}")
        for_words = self.draw.randint(1, max(1, count // 2))
        values: list[str] = []
        while len(values) < count:
            value = self._value()
            values += [value] if value not in values else []
        roles: list[Aspect] = ["code" if number < count - for_words else "feedback" for number in range(count)]
        return tuple(self._criterion(*item) for item in zip(names.values(), values, roles, strict=True))

    def _criterion(self, variable: str, value: str, role: Aspect) -> Asked:
        words = {"v": variable, "x": value, "p": _POINTS, "h": _POINTS // 2}
        guidance = self.draw.choice(self.world.guidance).format(**words)
        title = self.world.criterion_title(self.draw)
        return Asked(variable, value, Criterion(variable, title, _POINTS, guidance, role, _POINTS // 2))

    def _value(self) -> str:
        return str(self.draw.randint(10, 99))

    def _another(self, right: str) -> str:
        """A wrong value: one digit is another."""
        while True:
            digits = list(right)
            digits[self.draw.randrange(len(digits))] = str(self.draw.randint(0, 9))
            if "".join(digits) != right and digits[0] != "0":
                return "".join(digits)

    def _solution(self, asked: Sequence[Asked], language: str) -> Submission:
        code = "\n".join(self._computation(item.variable, language) for item in asked if item.criterion.model == "code")
        output = "\n".join(f"{item.variable}={item.value}" for item in asked if item.criterion.model == "code")
        words = "\n".join(f"{item.variable}={item.value}." for item in asked if item.criterion.model == "feedback")
        parts = [SubmissionPart("output", output, "cell 1, output"), SubmissionPart("text", words, "cell 2")]
        return Submission(
            "solution", language, tuple(parts if self.plain else [SubmissionPart("code", code, "cell 1"), *parts])
        )

    # --- a submission ---

    def _submission(self, asked: Sequence[Asked], name: str) -> Labelled:
        kind: Kind = self.draw.choices(("notebook", "script", "prose"), (6, 3, 0 if self.plain else 1))[0]
        language = self.draw.choice(("R", "Python"))
        weights = self.draw.choice(((5, 3, 3), (8, 1, 1), (2, 4, 4)))  # good and weak students
        labels = {item.variable: self._label(item, weights, kind) for item in asked}
        code = [item for item in asked if item.criterion.model == "code"]
        words = [item for item in asked if item.criterion.model == "feedback"]
        printed, said = self._printed(code, asked, labels), self._said(words, asked, labels)
        programmed = self._programmed(code, asked, labels, language)
        parts = self._parts(kind, programmed, printed, said)
        labelled = Labelled(Submission(name, language if kind != "prose" else "", parts), kind, labels)
        return attack(labelled, self.world, self.draw, asked) if self.draw.random() < 0.2 else labelled

    def _label(self, item: Asked, weights: tuple[int, int, int], kind: Kind) -> Label:
        outcome = self.draw.choices(_OUTCOMES, weights)[0]
        if outcome == "missing" or (kind == "prose" and item.criterion.model == "code"):
            return Label("missing", 0, "")
        value = item.value if outcome == "right" else self._another(item.value)
        return Label(outcome, _POINTS if outcome == "right" else _POINTS // 2, f"{item.variable}={value}")

    def _parts(
        self, kind: Kind, programmed: list[str], printed: list[str], said: list[str]
    ) -> tuple[SubmissionPart, ...]:
        prose, code, output = "\n".join(said), "\n".join(programmed), "\n".join(printed)
        if kind == "prose":
            return (SubmissionPart("text", prose, "text"),)
        if kind == "script":
            remarks = "\n".join(f"# {line}" for line in (*printed, *said))
            return (SubmissionPart("code", f"{code}\n{remarks}", "script"),)
        cells = [
            SubmissionPart("code", code, "cell 1"),
            SubmissionPart("output", output, "cell 1, output"),
            SubmissionPart("text", prose, "cell 2"),
        ]
        return tuple(part for part in cells if part.text)

    def _programmed(
        self, code: Sequence[Asked], asked: Sequence[Asked], labels: dict[str, Label], language: str
    ) -> list[str]:
        kept = [item.variable for item in code if labels[item.variable].reported or self.draw.random() < 0.7]
        besides = 0 if self.plain else self.draw.choice((0, 0, 1, 2, 3, 6))
        others = [self._other_name(self.draw.choice(asked), asked) for _ in range(besides)]
        names = [*kept, *others]
        self.draw.shuffle(names)
        lines = [self._computation(name, language) for name in names]
        return lines or [f"# {self.world.sentence(self.draw)}"]

    def _computation(self, name: str, language: str) -> str:
        work = self.draw.choice(self.world.computations).format(o=self.world.word(self.draw))
        return f"{name} {'<-' if language == 'R' else '='} {work}"

    def _printed(self, code: Sequence[Asked], asked: Sequence[Asked], labels: dict[str, Label]) -> list[str]:
        lines = [labels[item.variable].evidence or self._instead(item, asked, "") for item in code]
        if not self.plain:
            lines += [self._decoy(asked) for _ in range(self.draw.randint(0, 1))]
            lines += self._planted(code, labels)
        self.draw.shuffle(lines)
        return [line for line in lines if line]

    def _said(self, words: Sequence[Asked], asked: Sequence[Asked], labels: dict[str, Label]) -> list[str]:
        lines = [self._sentence(item, asked, labels[item.variable]) for item in words]
        if not self.plain:
            lines += [self.world.sentence(self.draw) for _ in range(self.draw.randint(0, 2))]
            lines += self._planted(words, labels)
        self.draw.shuffle(lines)
        text = [line for line in lines if line] or [self.world.sentence(self.draw)]
        while sum(len(line) + 1 for line in text) > SHORT_TEXT_CHARS:  # longer texts are kept from the code prompt
            filler = [line for line in text if not any(item.variable in line for item in words)]
            if not filler:
                break
            text.remove(filler[0])
        return text

    def _sentence(self, item: Asked, asked: Sequence[Asked], label: Label) -> str:
        if not label.reported:
            return self._instead(item, asked, ".")
        value = label.evidence.removeprefix(f"{item.variable}=")
        return self.draw.choice(self.world.reports).format(v=item.variable, x=value)

    def _instead(self, item: Asked, asked: Sequence[Asked], sign: str) -> str:
        """A line where a report should be: nothing, an error, a remark, or the right value under another name."""
        kind = self.draw.random()
        if kind < 0.35:
            return f"{self._other_name(item, asked)}={item.value}{sign}"
        if kind < 0.6 and not sign:
            return self.draw.choice(self.world.errors).format(o=self.world.word(self.draw))
        if kind < 0.85:
            return self.draw.choice(self.world.mentions).format(v=item.variable)
        return ""

    def _other_name(self, item: Asked, asked: Sequence[Asked]) -> str:
        prefix = item.variable.partition("_")[0]
        while True:
            other, start = self.world.word(self.draw), self.draw.choice(PREFIXES)
            name = self.draw.choice((f"{prefix}_{other}", f"{item.variable}_{other}", f"{start}_{other}"))
            if all(name != asked_for.variable for asked_for in asked):
                return name

    def _decoy(self, asked: Sequence[Asked]) -> str:
        value = self.draw.choice(asked).value if self.draw.random() < 0.5 else str(self.draw.randint(10, 99))
        return self.draw.choice(self.world.decoys).format(x=value)

    def _planted(self, mine: Sequence[Asked], labels: dict[str, Label]) -> list[str]:
        """Right values where they earn nothing, so that their presence says little."""
        unearned = [item for item in mine if labels[item.variable].outcome != "right" and self.draw.random() < 0.5]
        return [self.draw.choice(self.world.decoys).format(x=item.value) for item in unearned]

    def _filler(self, least: int, most: int) -> str:
        return " ".join(self.world.sentence(self.draw) for _ in range(self.draw.randint(least, most)))

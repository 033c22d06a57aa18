"""A model's answer: the JSON schema that constrains it, the bound on its length, and a strict parser for it."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from grading.prompts.repetition import is_repetition
from grading.rubric.rubric import Criterion, Points
from messages.errors import KvasirError
from messages.jobs import QuestionAnswer

_AnswerT = TypeVar("_AnswerT")

# Maximum lengths in characters. The prompt states these limits, and the schema enforces them.
EVIDENCE_CHARS = 160
FEEDBACK_CHARS = 200
SUMMARY_CHARS = 400


# "not their own" means that the quote occurs only in text that the students were given: cells, template, instructions
# or rubric.
Evidence = Literal["found", "not found", "none given", "not their own"]


class AnswerError(KvasirError):
    """A model's answer does not follow its schema. The message names the place and what was found there."""


@dataclass(frozen=True, slots=True)
class CriterionGrade:
    """The grade of one submission for one criterion.

    `points` is one of the criterion's steps, or None, and then `reason` says why. `evidence_state` and `leaks` need the
    submission and the confidential texts, so `grading.points` fills them in.
    """

    id: str
    title: str
    max_points: Points
    points: Points | None
    evidence: str = ""
    evidence_state: Evidence = "none given"
    feedback: str = ""
    reason: str = ""
    # The points that each of several answers to the same prompt gives.
    sampled: tuple[Points, ...] = ()
    # Whether the feedback repeats the grading notes, the solution or the prompt. No student is allowed to see such
    # feedback.
    leaks: bool = False
    # The likelihood of each possible number of points, computed from the model's probabilities.
    likelihoods: Mapping[str, float] = field(default_factory=dict)
    min_points: Points = 0  # the fewest possible points; negative if the criterion can deduct points

    @property
    def distribution(self) -> Mapping[str, float]:
        """The share of each step: from the model's probabilities, or else from several answers.

        Empty if there is neither.
        """
        if self.likelihoods or len(self.sampled) < 2:
            return self.likelihoods
        counts = Counter(map(str, sorted(self.sampled)))
        return {step: count / len(self.sampled) for step, count in counts.items()}


def criterion_grade(criterion: Criterion, points: Points | None, **fields: Any) -> CriterionGrade:
    """Make a grade for this criterion."""
    return CriterionGrade(
        criterion.id, criterion.title, criterion.points, points, min_points=criterion.minimum, **fields
    )


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer: one entry for each criterion that was asked about, in order. An entry without points says why."""

    criteria: Mapping[str, CriterionGrade]
    summary: str = ""
    # Why there is no summary.
    no_summary: str = ""
    # The quote that, according to the model, addresses the grader, and the likelihood of the answer "yes". The
    # likelihood is None if it is unknown.
    passage: tuple[str, float | None] | None = None


# --- the schema ---


def answer_schema(criteria: Sequence[Criterion], with_summary: bool) -> dict[str, Any]:
    """Return the JSON schema of an answer.

    Every text is bounded, and the properties are in the order in which to write them.

    Evidence comes before points: a model writes from left to right, so it looks for evidence before it judges.
    """
    properties: dict[str, Any] = {criterion.id: criterion_schema(criterion) for criterion in criteria}
    if with_summary:
        properties["summary"] = _bounded_text(SUMMARY_CHARS)
    return _closed_object(properties)


def criterion_schema(criterion: Criterion) -> dict[str, Any]:
    """Return the JSON schema of the answer about one criterion."""
    return _closed_object(
        {
            "evidence": _bounded_text(EVIDENCE_CHARS),
            "points": {"enum": list(criterion.grid)},
            "feedback": _bounded_text(FEEDBACK_CHARS),
        }
    )


def _bounded_text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


def _closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


# The schema for a question that asks only for a summary.
SUMMARY_SCHEMA = _closed_object({"summary": _bounded_text(SUMMARY_CHARS)})
# The schema for the question of whether a passage addresses the grader. The quote comes first, so the model must look
# at the text before it decides.
PASSAGE_SCHEMA = _closed_object({"quote": _bounded_text(EVIDENCE_CHARS), "addressed": {"enum": ["no", "yes"]}})


def max_answer_tokens(schema: Mapping[str, Any], char_bytes: int = 6, space_bytes: int = 22) -> int:
    """Return a number of tokens within which every answer constrained by `schema` ends.

    A token is at least one byte of text. One character of a string takes at most 6 bytes (`\\uXXXX`; raw UTF-8 takes
    4), and a grammar counts each escape as one character, including each half of a surrogate pair. White space between
    two JSON tokens is at most 22 bytes (llama.cpp: two line breaks and 20 blanks); an engine whose grammar does not
    limit white space must limit it itself. One more token ends the answer.

    This worst case is several times what models write. `char_bytes=1, space_bytes=1` bounds an ASCII answer without
    escapes. Use these values for planning, and where a context is too short for the worst case: an answer that is cut
    off there is not JSON, so it becomes a failure and not a grade.
    """
    return _max_bytes(schema, char_bytes, space_bytes) + space_bytes + 1


def _max_bytes(schema: Mapping[str, Any], char_bytes: int, space_bytes: int) -> int:
    """Return the most bytes that a value and the white space after it can take."""
    if "enum" in schema:
        return max(len(json.dumps(value)) for value in schema["enum"]) + space_bytes
    if schema["type"] == "string":
        return 2 + int(schema["maxLength"]) * char_bytes + space_bytes
    members = [
        # White space can follow each key, colon and comma. There is no comma after the last member.
        len(json.dumps(key)) + 2 + 3 * space_bytes + _max_bytes(value, char_bytes, space_bytes)
        for key, value in schema["properties"].items()
    ]
    return 2 + 2 * space_bytes + sum(members)


# --- reading an answer ---


def parse_answer(text: str, criteria: Sequence[Criterion], with_summary: bool) -> ParsedAnswer:
    """Read a model's answer strictly: nothing is repaired or filled in.

    A text longer than its schema allows is accepted, because an engine without constraints may write it and its length
    does not affect points. Raises AnswerError, with one sentence, for any other deviation from the schema.
    """
    data = _load_object(text)
    expected = [criterion.id for criterion in criteria] + (["summary"] if with_summary else [])
    _check_keys("the answer", data, expected)
    answers = {criterion.id: _criterion_answer(criterion, data[criterion.id]) for criterion in criteria}
    return ParsedAnswer(answers, _student_text("the summary", data["summary"]) if with_summary else "")


def parse_criterion(text: str, criterion: Criterion) -> CriterionGrade:
    """Read the answer to a question about one criterion, as strictly as `parse_answer`. Raises AnswerError.

    In batches of an earlier form, the answer does not name the criterion.
    """
    data = _load_object(text)
    return _criterion_answer(criterion, data[criterion.id] if set(data) == {criterion.id} else data)


def parse_summary(text: str) -> str:
    """Read the answer to the question for a summary. Raises AnswerError."""
    data = _load_object(text)
    _check_keys("the answer", data, ("summary",))
    return _student_text("the summary", data["summary"])


def parse_passage(text: str, likelihoods: Sequence[float] = ()) -> tuple[str, float | None] | None:
    """Return the passage that the model says addresses the grader, as in `ParsedAnswer.passage`, or None.

    Raises AnswerError.

    likelihoods: those of "no" and "yes", if known. Then they decide, no matter which of the two was sampled.
    """
    data = _load_object(text)
    _check_keys("the answer", data, ("quote", "addressed"))
    if data["addressed"] not in ("yes", "no"):
        raise AnswerError(f"'addressed' is {data['addressed']!r:.40}, but must be 'yes' or 'no'")
    quote = _text_field("the quote", data["quote"])
    likelihood = likelihoods[1] if len(likelihoods) == 2 else None
    is_addressed = data["addressed"] == "yes" if likelihood is None else likelihood >= 0.5
    return (quote, likelihood) if is_addressed and quote else None


# --- several answers to one prompt: the median counts, and all points are kept ---


def parse_samples(texts: Sequence[str], criteria: Sequence[Criterion], with_summary: bool) -> ParsedAnswer:
    """Combine several answers to one prompt. Raises AnswerError unless more than half of them can be read.

    Each criterion gets the median of the points (the lower of two middle ones), with the evidence and feedback of the
    first answer that gave these points. The summary is that of the first answer.
    """
    parsed_answers = _readable(texts, lambda text: parse_answer(text, criteria, with_summary))
    if len(parsed_answers) == 1:
        return parsed_answers[0]
    median_answers = {
        criterion.id: _median([answer.criteria[criterion.id] for answer in parsed_answers]) for criterion in criteria
    }
    return ParsedAnswer(median_answers, parsed_answers[0].summary)


def parse_criterion_samples(answers: Sequence[QuestionAnswer], criterion: Criterion) -> CriterionGrade:
    """Combine several answers to a question about one criterion. Raises as `parse_samples`.

    The likelihoods of the steps are those of the first answer.
    """
    parsed_answers = _readable([answer.text for answer in answers], lambda text: parse_criterion(text, criterion))
    median_answer = _median(parsed_answers) if len(parsed_answers) > 1 else parsed_answers[0]
    shares = answers[0].likelihoods
    likelihoods = dict(zip(map(str, criterion.grid), shares, strict=True)) if len(shares) == len(criterion.grid) else {}
    return replace(median_answer, likelihoods=likelihoods)


def _readable(texts: Sequence[str], parse: Callable[[str], _AnswerT]) -> list[_AnswerT]:
    parsed_answers, errors = [], []
    for text in texts:
        try:
            parsed_answers.append(parse(text))
        except AnswerError as error:
            errors.append(error)
    if len(parsed_answers) * 2 <= len(texts):
        raise (
            errors[0]
            if len(texts) == 1
            else AnswerError(f"{len(errors)} of {len(texts)} answers can't be used: {errors[0]}")
        )
    return parsed_answers


def _median(answers: Sequence[CriterionGrade]) -> CriterionGrade:
    sampled_points = tuple(answer.points for answer in answers if answer.points is not None)
    middle = sorted(sampled_points)[(len(sampled_points) - 1) // 2]
    median_answer = next(answer for answer in answers if answer.points == middle)
    return replace(median_answer, sampled=sampled_points)


# --- the parts of an answer ---


def _load_object(text: str) -> dict[str, Any]:
    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated_keys = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if repeated_keys:
            raise AnswerError(f"the answer has the key {repeated_keys[0]!r:.60} twice")
        return dict(pairs)

    def no_constants(name: str) -> None:
        raise AnswerError(f"the answer contains {name}, which is not a number in JSON")

    try:
        data = json.loads(text, object_pairs_hook=no_repeats, parse_constant=no_constants)
    except json.JSONDecodeError as error:
        raise AnswerError(f"the answer is not JSON at character {error.pos:,} of {len(text):,}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"the answer is JSON that can't be read: {error}") from None
    if not isinstance(data, dict):
        raise AnswerError(f"the answer must be a JSON object, but it is {_kind(data)}")
    return data


def _check_keys(place: str, data: Mapping[str, Any], expected: Sequence[str]) -> None:
    for key in expected:
        if key not in data:
            raise AnswerError(f"{place} lacks {key!r}")
    for key in data:
        if key not in expected:
            raise AnswerError(f"{place} has {key!r:.60}, which was not asked for")


def _criterion_answer(criterion: Criterion, data: Any) -> CriterionGrade:
    if not isinstance(data, dict):
        raise AnswerError(f"{criterion.id!r} is {_kind(data)} instead of an object")
    _check_keys(repr(criterion.id), data, ("evidence", "points", "feedback"))
    return criterion_grade(
        criterion,
        _points(criterion, data["points"]),
        evidence=_text_field(f"evidence of {criterion.id!r}", data["evidence"]),
        feedback=_student_text(f"the feedback of {criterion.id!r}", data["feedback"]),
    )


def _points(criterion: Criterion, value: Any) -> Points:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise AnswerError(f"points of {criterion.id!r} are {_kind(value)} instead of a number")
    for grid_points in criterion.grid:
        if value == grid_points:
            return grid_points
    limits = f"{criterion.minimum} to {criterion.points} in steps of {criterion.step}"
    raise AnswerError(f"points of {criterion.id!r} must be {limits}, not {value!r:.40}")


def _student_text(place: str, value: Any) -> str:
    """Return a text that a student may read. Raises AnswerError if it only repeats itself."""
    text = _text_field(place.removeprefix("the "), value)
    if is_repetition(text):
        raise AnswerError(f"{place} only repeats itself")
    return text


def _text_field(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise AnswerError(f"{place} is {_kind(value)} instead of text")
    if any(0xD800 <= ord(char) < 0xE000 for char in value):
        raise AnswerError(f"{place} contains half a character (a lone surrogate)")
    return value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )

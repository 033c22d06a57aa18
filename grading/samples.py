"""Several answers to one prompt, from one prefill: the median counts, and how far they are apart is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from grading.prompts.answers import AnswerError, CriterionGrade, ParsedAnswer, parse_answer, parse_criterion
from grading.rubric.rubric import Criterion
from messages.jobs import QuestionAnswer

_AnswerT = TypeVar("_AnswerT")


def parse_samples(texts: Sequence[str], criteria: Sequence[Criterion], with_summary: bool) -> ParsedAnswer:
    """One answer made of several. Raises AnswerError unless more than half of them can be read.

    Each criterion gets the median of the points (of two middle ones the lower), with the evidence and feedback of the
    first answer that awarded it; the summary is that of the first answer.
    """
    parsed_answers = _readable(texts, lambda text: parse_answer(text, criteria, with_summary))
    if len(parsed_answers) == 1:
        return parsed_answers[0]
    median_answers = {
        criterion.id: _median([answer.criteria[criterion.id] for answer in parsed_answers]) for criterion in criteria
    }
    return ParsedAnswer(median_answers, parsed_answers[0].summary)


def parse_criterion_samples(answers: Sequence[QuestionAnswer], criterion: Criterion) -> CriterionGrade:
    """The same for answers to a question about one criterion. Raises as `parse_samples`.

    The likelihoods of the steps are those that the first answer came with.
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
        raise errors[0] if len(texts) == 1 else AnswerError(f"{len(errors)} of {len(texts)} answers: {errors[0]}")
    return parsed_answers


def _median(answers: Sequence[CriterionGrade]) -> CriterionGrade:
    sampled = tuple(answer.points for answer in answers if answer.points is not None)
    middle = sorted(sampled)[(len(sampled) - 1) // 2]
    median_answer = next(answer for answer in answers if answer.points == middle)
    return replace(median_answer, sampled=sampled)

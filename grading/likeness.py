"""Groups like answers to one criterion, so that a person decides on them once. No model takes part.

Answers are alike if their points and the quoted evidence are equal. On request, answers with equal points are also
alike if their passages have most of their short character n-grams in common. This uses cosines of term frequencies, and
agglomerative clustering with complete linkage, so that any two members of a group are alike. It needs scikit-learn
(extra `evaluate`). Rare n-grams get no extra weight: with idf, likeness predicted the points less well on both sets of
SAF.

If answers are grouped by likeness of text, a decision that is right for one answer is wrong for some others; `python -m
benchmarks.groups` has the numbers. So by default only equal evidence and points form groups, and a person sees how the
members of a group differ.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grading.evaluation.agreement import extra
from grading.points import CriterionGrade
from grading.quotes import quoted_lines
from grading.rubric.rubric import Points
from grading.submissions.submission import Submission

# The largest distance between two answers of a group. If all answers of a group get the points of one of them, points
# change on average by at most 2 % of full points. This was measured for distances up to 0.375, on the English and the
# German answers of the data set SAF. The value here is 0.025 smaller.
MAX_DISTANCE = 0.35
# The difference in length is part of the distance, because a long answer can be right although its beginning alone
# would be wrong.
_LENGTH_WEIGHT = 0.2
_CONTEXT_LINES = 12  # number of lines shown before and after the quote
_MOST_CHARS = 4_000  # of a passage
_MOST_TEXTS = 2_000  # the distances between this many texts take 32 MB


@dataclass(frozen=True, slots=True)
class CriterionAnswer:
    """The part of a submission that answers one criterion."""

    item_id: str
    # The model's points.
    points: Points | None
    # The evidence found in the work; "" if none was found.
    quote: str
    # The cell or file that contains the quote. If there is no quote, this is all of the student's own text except
    # outputs.
    text: str

    @property
    def passage(self) -> str:
        """The lines around the quote, cut to a fixed length. This is what is shown, and compared with other answers."""
        lines = self.text.split("\n")
        numbers = quoted_lines(self.text, [self.quote]) or {0, len(lines)}
        around = slice(max(0, min(numbers) - _CONTEXT_LINES), max(numbers) + _CONTEXT_LINES + 1)
        return "\n".join(lines[around])[:_MOST_CHARS]


def answer_of(item_id: str, grade: CriterionGrade, work: Submission) -> CriterionAnswer:
    """Return the answer that this criterion's grade is about."""
    quote = grade.evidence if grade.evidence_state == "found" else ""
    quoted_parts = [part.text for part in work.parts if quote and quoted_lines(part.text, [quote])]
    return CriterionAnswer(item_id, grade.points, quote, quoted_parts[0] if quoted_parts else own_text(work))


def own_text(work: Submission) -> str:
    """Return what the student wrote, without outputs and without parts that the class was given."""
    return "\n".join(part.text for part in work.parts if part.kind != "output" and not part.holds_only_given_text)


def group_answers(answers: Sequence[CriterionAnswer], max_distance: float = 0.0) -> list[list[CriterionAnswer]]:
    """Group the answers, the largest group first. Each group's first answer represents it best.

    `max_distance`, from 0 to 1, is the distance up to which passages count as alike; with 0, only equal evidence does.
    Raises EvaluationError if scikit-learn is needed and missing.
    """
    times = Counter(answer.text for answer in answers)
    by_evidence: dict[tuple[Points | None, str], list[CriterionAnswer]] = {}
    # The most frequent text comes first.
    for answer in sorted(answers, key=lambda answer: -times[answer.text]):
        # Upper and lower case are kept, because names in code are case-sensitive.
        evidence = " ".join((answer.quote or answer.text).split())
        by_evidence.setdefault((answer.points, evidence), []).append(answer)
    groups = list(by_evidence.values())
    are_compared = max_distance > 0 and 1 < len(groups) <= _MOST_TEXTS
    return sorted(_join_like(groups, max_distance) if are_compared else groups, key=len, reverse=True)


def _join_like(groups: Sequence[Sequence[CriterionAnswer]], max_distance: float) -> list[list[CriterionAnswer]]:
    """Join groups that have equal points and like first answers. The most central group comes first."""
    passages = [group[0].passage or "-" for group in groups]
    runs = (
        extra("sklearn.feature_extraction.text")
        .TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, use_idf=False)
        .fit_transform(passages)
    )
    lengths = np.log1p([len(passage) for passage in passages])
    distances = (1 - (runs @ runs.T).toarray() + _LENGTH_WEIGHT * abs(lengths[:, None] - lengths)).clip(0)
    points = np.array([group[0].points for group in groups], object)
    distances[points[:, None] != points] = 9.0  # larger than any maximum distance
    labels = (
        extra("sklearn.cluster")
        .AgglomerativeClustering(None, metric="precomputed", linkage="complete", distance_threshold=max_distance)
        .fit(distances)
        .labels_
    )
    return [
        [answer for place in places[middle_first] for answer in groups[place]]
        for places in (np.flatnonzero(labels == label) for label in range(labels.max() + 1))
        for middle_first in [distances[np.ix_(places, places)].sum(1).argsort(kind="stable")]
    ]

"""Like answers to one criterion in groups, so that a person decides on them once. No model takes part.

Answers are alike where their points and what is quoted as their evidence are equal; on request also where their points
are equal and their passages have most of their short runs of characters in common: tf-idf, and agglomerative clustering
with complete linkage, so that any two of a group are alike. That needs scikit-learn (extra `evaluate`).

By text alone a decision that is right for one answer is wrong for some of the others: `python -m benchmarks.groups`
has the figures. So only equal evidence and points form groups unless somebody asks for more, and a person sees in what
the members of a group differ.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grading.evaluation.agreement import extra
from grading.points import CriterionGrade
from grading.quotes import quoted_lines
from grading.rubric.rubric import Points
from grading.submissions.submission import Submission

# The loosest cut that added at most 2 % of full points on the German answers of SAF; on the English ones it added less.
MAX_DISTANCE = 0.4
LENGTH_WEIGHT = 0.2  # an answer that says more may be right where its beginning alone is not
_CONTEXT_LINES = 12  # that are shown before and after the quote
_MOST_TEXTS = 1_500  # with equal points: their distances are 18 MB
_MOST_CHARS = 4_000  # of a passage


@dataclass(frozen=True, slots=True)
class Answer:
    """What one submission says to a criterion."""

    item_id: str
    points: Points | None  # by the model
    quote: str  # the evidence, where it stands in the work; "" for none
    text: str  # the cell, or file, in which the quote stands; without one all that is the student's own, but outputs

    @property
    def passage(self) -> str:
        """The lines around the quote, at most so many characters: what is shown, and compared with others."""
        lines, numbers = self.text.split("\n"), quoted_lines(self.text, [self.quote])
        around = lines[max(0, min(numbers) - _CONTEXT_LINES) : max(numbers) + _CONTEXT_LINES + 1] if numbers else lines
        return "\n".join(around)[:_MOST_CHARS]


def answer_of(item_id: str, grade: CriterionGrade, work: Submission) -> Answer:
    """The answer that this grade of a criterion is about."""
    quote = grade.evidence if grade.evidence_state == "found" else ""
    quoted_parts = [part.text for part in work.parts if quote and quoted_lines(part.text, [quote])]
    own_parts = [part.text for part in work.parts if part.kind != "output" and not part.holds_only_given_text]
    return Answer(item_id, grade.points, quote, quoted_parts[0] if quoted_parts else "\n".join(own_parts))


def group_answers(answers: Iterable[Answer], max_distance: float = 0.0) -> list[list[Answer]]:
    """Each answer in one group, the largest group first; a group's first answer stands for the others best.

    `max_distance`: up to which distance, from 0 to 1, passages count as alike; 0 leaves it at equal evidence.
    """
    equal_groups: dict[tuple[Points | None, str], list[Answer]] = {}
    for answer in answers:
        equal_groups.setdefault((answer.points, _plain(answer.quote or answer.text)), []).append(answer)
    groups = [_most_common_first(group) for group in equal_groups.values()]
    if max_distance:
        by_points: dict[Points | None, list[list[Answer]]] = {}
        for group in groups:
            by_points.setdefault(group[0].points, []).append(group)
        groups = [joined for same_points in by_points.values() for joined in _join_like(same_points, max_distance)]
    return sorted(groups, key=len, reverse=True)


def reads_the_same(first: Answer, second: Answer) -> bool:
    """Whether the whole cell or file of both is in the same words; white space and line breaks don't count."""
    return _plain(first.text) == _plain(second.text)


def has_text_likeness() -> bool:
    """Whether what `max_distance` needs is installed."""
    return importlib.util.find_spec("sklearn") is not None


def distances(texts: Sequence[str]) -> NDArray[np.float64]:
    """How far each text is from each other one, from 0: (texts, texts). Raises EvaluationError without scikit-learn."""
    make_vectors = extra("sklearn.feature_extraction.text").TfidfVectorizer
    vectors = make_vectors(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True).fit_transform(texts)
    lengths = np.log1p([len(text) for text in texts])
    by_length = LENGTH_WEIGHT * abs(lengths[:, None] - lengths[None, :])
    matrix: NDArray[np.float64] = np.maximum(0, 1 - (vectors @ vectors.T).toarray()) + by_length
    np.fill_diagonal(matrix, 0)
    return matrix


def _plain(text: str) -> str:
    """Without differences in white space; case stays, since in code it is another name."""
    return " ".join(text.split())


def _most_common_first(group: list[Answer]) -> list[Answer]:
    texts = [_plain(answer.text) for answer in group]
    first = texts.index(Counter(texts).most_common(1)[0][0])
    return [group[first], *group[:first], *group[first + 1 :]]


def _join_like(groups: list[list[Answer]], max_distance: float) -> list[list[Answer]]:
    """Groups of equal points, those joined whose first answers are alike."""
    texts = [group[0].passage for group in groups]
    if not 1 < len(groups) <= _MOST_TEXTS or not any(text.strip() for text in texts):
        return groups
    matrix = distances(texts)
    clustering = extra("sklearn.cluster").AgglomerativeClustering
    labels = clustering(None, metric="precomputed", linkage="complete", distance_threshold=max_distance).fit(matrix)
    joined_groups = []
    for label in range(labels.n_clusters_):
        numbers = np.flatnonzero(labels.labels_ == label)
        middle = numbers[matrix[np.ix_(numbers, numbers)].sum(1).argmin()]
        ordered = [middle, *(number for number in numbers if number != middle)]
        joined_groups.append([answer for number in ordered for answer in groups[number]])
    return joined_groups

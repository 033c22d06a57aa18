"""Like answers to one criterion in groups, so that a person decides on them once. No model takes part.

Answers are alike where their points and what is quoted as their evidence are equal; on request also where their points
are equal and their passages have most of their short runs of characters in common: cosines of term frequencies, and
agglomerative clustering with complete linkage, so that any two of a group are alike. That needs scikit-learn (extra
`evaluate`). Rare runs weigh no more than others: with idf, likeness says less of the points, on both sets of SAF.

By text alone a decision that is right for one answer is wrong for some of the others: `python -m benchmarks.groups`
has the figures. So only equal evidence and points form groups unless somebody asks for more, and a person sees in what
the members of a group differ.
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

# At 0.375 deciding by one answer of each group adds at most 2 % of full points on either language of SAF; a step less.
MAX_DISTANCE = 0.35
_LENGTH_WEIGHT = 0.2  # an answer that says more may be right where its beginning alone is not
_CONTEXT_LINES = 12  # lines shown before and after the quote
_MOST_CHARS = 4_000  # of a passage
_MOST_TEXTS = 2_000  # their distances are 32 MB


@dataclass(frozen=True, slots=True)
class CriterionAnswer:
    """What one submission says to a criterion."""

    item_id: str
    points: Points | None  # by the model
    quote: str  # the evidence, where it stands in the work; "" for none
    text: str  # the cell, or file, in which the quote stands; without one all that is the student's own, but outputs

    @property
    def passage(self) -> str:
        """The lines around the quote, at most so many characters: what is shown, and compared with others."""
        lines = self.text.split("\n")
        numbers = quoted_lines(self.text, [self.quote]) or {0, len(lines)}
        around = slice(max(0, min(numbers) - _CONTEXT_LINES), max(numbers) + _CONTEXT_LINES + 1)
        return "\n".join(lines[around])[:_MOST_CHARS]


def answer_of(item_id: str, grade: CriterionGrade, work: Submission) -> CriterionAnswer:
    """The answer that this grade of a criterion is about."""
    quote = grade.evidence if grade.evidence_state == "found" else ""
    quoted_parts = [part.text for part in work.parts if quote and quoted_lines(part.text, [quote])]
    return CriterionAnswer(item_id, grade.points, quote, quoted_parts[0] if quoted_parts else own_text(work))


def own_text(work: Submission) -> str:
    """What the student wrote, without outputs and without parts that the class was given."""
    return "\n".join(part.text for part in work.parts if part.kind != "output" and not part.holds_only_given_text)


def group_answers(answers: Sequence[CriterionAnswer], max_distance: float = 0.0) -> list[list[CriterionAnswer]]:
    """Each answer in one group, the largest group first; a group's first answer stands for the others best.

    `max_distance`: up to which distance, from 0 to 1, passages count as alike; 0 leaves it at equal evidence. Raises
    EvaluationError where scikit-learn is missing for it.
    """
    times = Counter(answer.text for answer in answers)
    by_evidence: dict[tuple[Points | None, str], list[CriterionAnswer]] = {}
    for answer in sorted(answers, key=lambda answer: -times[answer.text]):  # the most frequent comes first
        evidence = " ".join((answer.quote or answer.text).split())  # case stays: in code it is another name
        by_evidence.setdefault((answer.points, evidence), []).append(answer)
    groups = list(by_evidence.values())
    are_compared = max_distance > 0 and 1 < len(groups) <= _MOST_TEXTS
    return sorted(_join_like(groups, max_distance) if are_compared else groups, key=len, reverse=True)


def _join_like(groups: Sequence[Sequence[CriterionAnswer]], max_distance: float) -> list[list[CriterionAnswer]]:
    """Groups of equal points, those joined whose first answers are alike, the one in the middle first."""
    passages = [group[0].passage or "-" for group in groups]
    runs = (
        extra("sklearn.feature_extraction.text")
        .TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True, use_idf=False)
        .fit_transform(passages)
    )
    lengths = np.log1p([len(passage) for passage in passages])
    distances = (1 - (runs @ runs.T).toarray() + _LENGTH_WEIGHT * abs(lengths[:, None] - lengths)).clip(0)
    points = np.array([group[0].points for group in groups], object)
    distances[points[:, None] != points] = 9.0  # beyond every cut
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

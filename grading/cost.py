"""What a regrade asks, told before it is run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from dataclasses import dataclass

from grading.grade import Assignment
from grading.order import answer_tokens
from grading.prompts.questions import PASSAGE
from grading.submissions.tokens import estimate_tokens
from producers.batch.batch import BatchEntry
from producers.words import listed, plural


@dataclass(frozen=True, slots=True)
class Cost:
    """What a regrade asks. Tokens are estimates: of prompts, and of answers as long as they may become."""

    asked: tuple[str, ...]  # criteria, and what else is asked about anew; all in one answer if there are no questions
    removed: tuple[str, ...]  # criteria
    submissions: int
    jobs: int
    questions: int
    prompt_tokens: int
    answer_tokens: int
    all_answer_tokens: int  # if the whole class were asked everything
    answered: int = 0  # further jobs: a round that was left has their answers

    @property
    def answered_whole(self) -> bool:
        """Whether a round has all the answers, and nothing is left to ask."""
        return bool(self.answered and not self.jobs)

    def __str__(self) -> str:
        said = [f"Asked about anew: {listed(self.asked)}."] if self.asked else []
        said += [f"No longer asked about: {listed(self.removed)}."] if self.removed else []
        if self.answered_whole:
            return " ".join(said)
        share = 100 * self.answer_tokens / max(1, self.all_answer_tokens)
        questions = f", {plural(self.questions, 'question')}" if self.questions else ""
        said.append(
            f"{plural(self.submissions, 'submission')}, {plural(self.jobs, 'job')}{questions}: about "
            f"{self.prompt_tokens:,} tokens of prompts are computed again where their KV cache has gone, and at most "
            f"{self.answer_tokens:,} tokens of answers, {share:.0f}% of the class's."
        )
        return " ".join(said)


def cost_of(
    assignment: Assignment,
    entries: Iterable[BatchEntry],
    succeeded: Container[str],
    graded: Set[str],
    answered: Container[str] = (),
) -> Cost:
    """What of this class's work a batch has no answer to yet.

    Args:
        entries: the batch's jobs; succeeded: ids of those that have an answer.
        graded: ids of the criteria that the class has grades for.
        answered: ids of jobs that have an answer elsewhere, in a round: they stand for a change, and cost nothing.
    """
    tasks, rubric = assignment.tasks, assignment.rubric
    new = [task for task in tasks if task.job_id not in succeeded]
    known = {key for entry in entries for key in entry.asked}
    names = {key.partition(":")[0] for task in new for key in task.asked if key not in known}
    asked = [one.id for one in rubric.criteria if one.id in names or any(not task.asked for task in new)]
    left = [task for task in new if task.job_id not in answered]
    others = [_SAID.get(name, name) for name in sorted(names - {one.id for one in rubric.criteria})]
    letters = {model.name: model.letters_per_token for model in assignment.request.models.values()}
    return Cost(
        asked=(*asked, *others),
        removed=tuple(sorted(graded - {one.id for one in rubric.criteria})),
        submissions=len({task.item_id.rpartition(".")[0] for task in left}),
        jobs=len(left),
        questions=sum(len(task.questions) for task in left),
        prompt_tokens=sum(estimate_tokens(task.prompt.shared + task.prompt.own, letters[task.model]) for task in left),
        answer_tokens=sum(answer_tokens(task.sampling, task.questions) for task in left),
        all_answer_tokens=sum(answer_tokens(task.sampling, task.questions) for task in tasks),
        answered=len(new) - len(left),
    )


_SAID = {PASSAGE: "whether a passage speaks to the grader"}

"""What a regrade asks, told before it is run."""

from collections.abc import Container, Iterable, Set
from dataclasses import dataclass

from grading.jobs import Assignment
from grading.prompts.questions import PASSAGE
from grading.submissions.tokens import estimate_tokens
from messages.jobs import answer_tokens, prompt_text
from producers.batch.batch import BatchEntry
from producers.words import join_with_and, plural


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
    def is_fully_answered(self) -> bool:
        """Whether a round has all the answers, and nothing is left to ask."""
        return bool(self.answered and not self.jobs)

    def __str__(self) -> str:
        sentences = [f"Asked about anew: {join_with_and(self.asked)}."] if self.asked else []
        sentences += [f"No longer asked about: {join_with_and(self.removed)}."] if self.removed else []
        if self.is_fully_answered:
            return " ".join(sentences)
        share = 100 * self.answer_tokens / max(1, self.all_answer_tokens)
        questions = f", {plural(self.questions, 'question')}" if self.questions else ""
        sentences.append(
            f"{plural(self.submissions, 'submission')}, {plural(self.jobs, 'job')}{questions}: about "
            f"{self.prompt_tokens:,} tokens of prompts are computed again where their KV cache has gone, and at most "
            f"{self.answer_tokens:,} tokens of answers, {share:.0f}% of the class's."
        )
        return " ".join(sentences)


def cost_of(
    assignment: Assignment,
    entries: Iterable[BatchEntry],
    succeeded_ids: Container[str],
    graded_criteria: Set[str],
    answered_ids: Container[str] = (),
) -> Cost:
    """What of this class's work a batch has no answer to yet.

    Args:
        entries: the batch's jobs; succeeded: ids of those that have an answer.
        graded_criteria: ids of the criteria that the class has grades for.
        answered_ids: ids of jobs that have an answer elsewhere, in a round: they stand for a change, and cost nothing.
    """
    rubric = assignment.rubric
    new = [task for task in assignment.tasks if task.job.job_id not in succeeded_ids]
    batch_keys = {key for entry in entries for key in entry.asked}
    names = {key.partition(":")[0] for task in new for key in task.questions_by_key if key not in batch_keys}
    criteria = [
        criterion.id
        for criterion in rubric.criteria
        if criterion.id in names or any(not task.questions_by_key for task in new)
    ]
    open_jobs = [task.job for task in new if task.job.job_id not in answered_ids]
    other_topics = [
        _TOPIC_WORDS.get(name, name) for name in sorted(names - {criterion.id for criterion in rubric.criteria})
    ]
    letters = {model.name: model.letters_per_token for model in assignment.request.models.values()}
    return Cost(
        asked=(*criteria, *other_topics),
        removed=tuple(sorted(graded_criteria - {criterion.id for criterion in rubric.criteria})),
        submissions=len({job.item_id.rpartition(".")[0] for job in open_jobs}),
        jobs=len(open_jobs),
        questions=sum(len(job.questions) for job in open_jobs),
        prompt_tokens=sum(estimate_tokens(prompt_text(job.prompt), letters[job.model]) for job in open_jobs),
        answer_tokens=sum(map(answer_tokens, open_jobs)),
        all_answer_tokens=sum(map(answer_tokens, assignment.jobs)),
        answered=len(new) - len(open_jobs),
    )


_TOPIC_WORDS = {PASSAGE: "whether a passage speaks to the grader"}

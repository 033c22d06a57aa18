"""Makes the jobs of a class: each submission cut to size, its prompts, their questions, and how answers are sampled."""

import itertools
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grading.names.pseudonyms import pseudonym
from grading.own_work import copy_reason
from grading.prompts.answers import answer_schema, max_answer_tokens
from grading.prompts.prompt import ExampleSet, build_prompt, fence_for, text_of
from grading.prompts.questions import PASSAGE, SUMMARY, questions_of
from grading.request import GradeRequest
from grading.roster import UNKNOWN_OWNER, Owner
from grading.rubric.checks import CheckFinding, run_checks
from grading.rubric.rubric import ASPECTS, Aspect, Rubric
from grading.submissions.reading import Submission
from grading.submissions.tokens import estimate_tokens
from grading.submissions.truncation import USUAL_TOKENS, Count, Cut, Limits, count_parts, limits_within, truncate
from messages.errors import ConfigError
from messages.jobs import (
    MAX_QUESTION_ANSWERS,
    JobResult,
    Part,
    PrefillJob,
    Question,
    QuestionAnswer,
    Sampling,
    answer_tokens,
    job_id,
    prompt_text,
)
from producers.batch.batch import BatchEntry
from producers.words import join_with_and, plural

# Temperature 0 would make all answers to one prompt the same.
SAMPLES_TEMPERATURE = 0.3
_KEY_DIGITS = 12
# Number of tokens of a part's heading, which also contains the fence.
_HEADING_TOKENS = 36
_ROOM_STEP = 1_024  # tokens


@dataclass(frozen=True, slots=True)
class Task:
    """A job that grades one aspect of one submission. A job without questions asks for all criteria at once."""

    job: PrefillJob  # the job, with only the fields known before publishing filled in
    aspect: Aspect
    # All questions of the job, by key as in `BatchEntry`. None stands for a question whose answer is no longer used.
    questions_by_key: Mapping[str, Question | None]

    def question_answers(
        self, result: JobResult | None
    ) -> Iterator[tuple[str, Question | None, tuple[QuestionAnswer, ...]]]:
        """Yield each question's name, the question, and its answers, if there are any.

        The question is None if its answer is no longer of use.
        """
        place = 0
        for key, question in self.questions_by_key.items():
            name, answers, _ = key.split(":")
            yield name, question, result.answers[place : place + int(answers)] if result else ()
            place += int(answers)

    @property
    def may_run(self) -> bool:
        """Whether the job can be rebuilt. A job that can't has succeeded, and is kept for some of its answers."""
        return None not in self.questions_by_key.values()


@dataclass(frozen=True, slots=True)
class Item:
    """One submission, cut to size, with its tasks. It has no tasks if it can't be read or is empty."""

    submission: Submission
    cuts: tuple[Cut, ...]
    tasks: tuple[Task, ...]
    item_id: str
    findings: tuple[CheckFinding, ...] = ()
    fence: str = ""
    copy_reason: str = ""  # why the work may be a copy of the solution; "" if it does not look like a copy
    owner: Owner = UNKNOWN_OWNER


@dataclass(frozen=True, slots=True)
class Assignment:
    """A class's work: read, cut to size, and turned into prompts."""

    request: GradeRequest
    rubric: Rubric
    items: tuple[Item, ...]
    solution: Submission | None = None
    template: Submission | None = None
    # Text that the students were given before they began.
    given_passages: tuple[str, ...] = ()
    # Item ids of the submissions that this run grades.
    selected_ids: frozenset[str] = frozenset()
    # Contents of the files of rubric, solution and template.
    input_data: Mapping[str, bytes] = field(default_factory=dict)
    changed_files: tuple[Path, ...] = ()  # files named by the user that differ from the batch's copies
    work_digests: Mapping[str, str] = field(default_factory=dict)  # submission's name -> digest of its files
    examples: ExampleSet | None = None

    @property
    def tasks(self) -> list[Task]:
        """All tasks.

        Those for code come first, because that model is slower at prefill; within an aspect, the longest come first.
        """
        tasks = [task for item in self.items for task in item.tasks]
        tasks.sort(key=lambda task: expected_work(task.job), reverse=True)
        return [task for aspect in ASPECTS for task in tasks if task.aspect == aspect]

    @property
    def jobs(self) -> list[PrefillJob]:
        """The jobs of all tasks, in the same order."""
        return [task.job for task in self.tasks]


def expected_work(job: PrefillJob) -> tuple[int, int]:
    """Return a sort key that grows with a job's work.

    It consists of the tokens that may be generated, then the bytes of the student's part.

    Queues are first in, first out, so a batch publishes its longest jobs first: a long job that begins last would keep
    one slot busy while all others are idle.

    Only facts known before decoding are used. A model's mean answer length, which workers learn, is the same for all
    jobs of a queue and would not change their order.
    """
    return answer_tokens(job), len(job.prompt[-1].text.encode())


class EarlierJobs:
    """The jobs with questions that a batch has already."""

    def __init__(self, planned_entries: Sequence[BatchEntry], succeeded_ids: Container[str]) -> None:
        self._succeeded_ids = succeeded_ids
        self._names = {entry.item_id for entry in planned_entries}
        self._entries: dict[str, list[BatchEntry]] = {}
        for entry in planned_entries:
            if entry.asked:
                item, _, aspect = entry.item_id.rpartition(".")
                self._entries.setdefault(f"{item}.{aspect.partition('-')[0]}", []).append(entry)

    def usable_entries(self, item_id: str, model: str, wanted_keys: Set[str]) -> list[BatchEntry]:
        """Return earlier jobs for this prompt that ask only wanted questions, or have already answered a wanted one."""
        return [
            entry
            for entry in self._entries.get(item_id, ())
            if entry.model == model
            and (
                wanted_keys >= set(entry.asked)
                or (entry.job_id in self._succeeded_ids and not wanted_keys.isdisjoint(entry.asked))
            )
        ]

    def free_names(self, item_id: str) -> Iterator[str]:
        """Return unused item ids for further jobs of this prompt."""
        names = (f"{item_id}-{number}" if number > 1 else item_id for number in itertools.count(1))
        return (name for name in names if name not in self._names)


def _split_into_jobs(questions: Mapping[str, Question]) -> Iterator[dict[str, Question]]:
    """Split questions into groups, each as large as one job may have."""
    group: dict[str, Question] = {}
    answers = 0
    for key, question in questions.items():
        answers += question.sampling.answers
        if answers > MAX_QUESTION_ANSWERS:
            yield group
            group, answers = {}, question.sampling.answers
        group[key] = question
    if group:
        yield group


class PromptMaker:
    """Builds the items of one class. Everything that is the same for all of them is computed once."""

    def __init__(
        self, assignment: Assignment, batch_id: str, secret: bytes, common: Set[str], earlier: EarlierJobs, form: int
    ) -> None:
        """`assignment` is the class's work, still without items. `form` is the form of the questions."""
        self._form = form
        self._earlier = earlier
        self._asks_together = assignment.request.ask == "together"
        self._assignment = assignment
        self._batch_id = batch_id
        self._secret = secret
        self._common = common
        self._aspects = [aspect for aspect in ASPECTS if assignment.rubric.for_model(aspect)]
        if missing_aspects := [aspect for aspect in self._aspects if aspect not in assignment.request.models]:
            raise ConfigError(
                f"the rubric needs a {missing_aspects[0]} model, but this batch has none: run kvasir grade again"
            )
        self._questions = {aspect: self._named_questions(aspect) for aspect in self._aspects if not self._asks_together}
        self._samplings = {aspect: self._longest_sampling(aspect) for aspect in self._aspects}
        self._space = min([self._submission_space(aspect) for aspect in self._aspects], default=USUAL_TOKENS)

    def item(self, submission: Submission) -> Item:
        """Return one submission, cut to size, with its prompts."""
        assignment = self._assignment
        item_id = pseudonym(submission.name, self._secret)
        if not submission.is_gradable or (assignment.examples and submission.name in assignment.examples.points):
            return Item(submission, (), (), item_id)
        letters = min(model.letters_per_token for model in assignment.request.models.values())
        short, cuts = self._cut(submission, lambda text: estimate_tokens(text, letters))
        fence = fence_for(self._secret, text_of(short))
        solution = assignment.solution.parts if assignment.solution else ()
        findings = tuple(run_checks(assignment.rubric.checks, submission.parts, solution, submission.language))
        tasks = []
        for aspect in self._aspects:
            graded_here = {"", *(criterion.id for criterion in assignment.rubric.for_model(aspect))}
            finding_texts = [finding.text for finding in findings if finding.criterion in graded_here]
            prompt = build_prompt(
                aspect,
                assignment.rubric,
                assignment.solution,
                assignment.template,
                short,
                fence,
                cuts,
                finding_texts,
                asks_together=self._asks_together,
                examples=assignment.examples,
            )
            tasks += self._tasks(aspect, prompt, f"{item_id}.{aspect}")
        return Item(
            submission,
            cuts,
            tuple(tasks),
            item_id,
            findings,
            fence,
            copy_reason(submission, assignment.rubric, assignment.solution, assignment.given_passages, self._common),
        )

    def _tasks(self, aspect: Aspect, prompt: tuple[Part, ...], item_id: str) -> list[Task]:
        """Return the tasks for one aspect of a submission: a single job, or jobs that together ask all questions."""
        model, sampling = self._assignment.request.models[aspect].name, self._samplings[aspect]

        def task(job: str, name: str, by_key: Mapping[str, Question | None]) -> Task:
            questions = tuple(question for question in by_key.values() if question)
            prefill_job = PrefillJob(job, self._batch_id, name, model, prompt, sampling, questions=questions)
            return Task(prefill_job, aspect, by_key)

        if self._asks_together:
            return [task(job_id(self._batch_id, item_id, model, prompt, sampling), item_id, {})]
        wanted_questions = {}
        for name, question in self._questions[aspect].items():
            digest = job_id(self._batch_id, item_id, model, prompt, Sampling(1), [question])[:_KEY_DIGITS]
            wanted_questions[f"{name}:{question.sampling.answers}:{digest}"] = question
        tasks = [
            task(entry.job_id, entry.item_id, {key: wanted_questions.get(key) for key in entry.asked})
            for entry in self._earlier.usable_entries(item_id, model, wanted_questions.keys())
        ]
        planned_keys = {key for planned_task in tasks for key in planned_task.questions_by_key}
        new_questions = {key: question for key, question in wanted_questions.items() if key not in planned_keys}
        groups = _split_into_jobs(new_questions)
        for name, group in zip(self._earlier.free_names(item_id), groups, strict=False):
            job = job_id(self._batch_id, name, model, prompt, sampling, tuple(group.values()))
            tasks.append(task(job, name, group))
        return tasks

    def _named_questions(self, aspect: Aspect) -> dict[str, Question]:
        """Return the aspect's questions by name. Only questions about a criterion ask for several answers."""
        samples = self._assignment.request.samples
        return {
            name: Question(
                (Part("user", text),),
                self._sampling(aspect, schema, 1 if name in (SUMMARY, PASSAGE) else samples),
            )
            for name, (text, schema) in questions_of(aspect, self._assignment.rubric, self._form).items()
        }

    def _longest_sampling(self, aspect: Aspect) -> Sampling:
        """Return the sampling of the aspect's longest answer."""
        if not self._asks_together:
            samplings = [question.sampling for question in self._questions[aspect].values()]
            return max(samplings, key=lambda sampling: sampling.max_tokens)
        schema = answer_schema(self._assignment.rubric.for_model(aspect), with_summary=aspect == "feedback")
        return self._sampling(aspect, schema, self._assignment.request.samples)

    def _sampling(self, aspect: Aspect, schema: Mapping[str, Any], answers: int) -> Sampling:
        """Return a sampling whose token limit lets a constrained answer end, as far as the model's context allows."""
        model = self._assignment.request.models[aspect]
        worst = max_answer_tokens(schema)
        likely = max_answer_tokens(schema, char_bytes=1, space_bytes=1)
        return Sampling(
            min(worst, max(likely, model.context // 2)),
            model.temperature if answers == 1 else max(model.temperature, SAMPLES_TEMPERATURE),
            model.top_p,
            answers=answers,
            json_schema=json.dumps(schema, separators=(",", ":"), ensure_ascii=False),
        )

    def _cut(self, submission: Submission, count: Count) -> tuple[Submission, tuple[Cut, ...]]:
        """Cut the submission to the room that the models have, or to the requested size."""
        cap = self._assignment.request.max_submission_tokens
        if cap is None:
            # Prompts of earlier releases did not mark given cells, so this prompt does not mark them either.
            parts = tuple(replace(part, is_given_cell=False) for part in submission.parts)
            return truncate(replace(submission, parts=parts), self._earlier_limits(), count)
        # Rounding down keeps the room the same after a small change of the rubric. Otherwise one more sentence in the
        # rubric would move the cut in long submissions, and all questions about them would be asked again.
        room = self._space - self._space % _ROOM_STEP if self._space > 4 * _ROOM_STEP else self._space
        # Headings take room in the prompt too. At most half of the room is reserved for them, because if there are
        # thousands of parts, most parts are left out together with their headings.
        space = max(room - _HEADING_TOKENS * len(submission.parts), room // 2)
        total = min(space, cap or space)
        sizes = count_parts(submission, count)
        return (
            (submission, ())
            if sum(sizes.values()) <= total
            else truncate(submission, limits_within(sizes, total), count)
        )

    def _earlier_limits(self) -> Limits:
        """Return the default limits, scaled down if the model's context has no room for them."""
        limits = Limits()
        share = min(1.0, self._space / USUAL_TOKENS)
        return replace(
            limits,
            code_tokens=int(limits.code_tokens * share),
            text_tokens=int(limits.text_tokens * share),
            output_tokens=int(limits.output_tokens * share),
        )

    def _submission_space(self, aspect: Aspect) -> int:
        """Return how many tokens a student's part may have with this aspect's model."""
        model = self._assignment.request.models[aspect]
        assignment, fence = self._assignment, fence_for(self._secret, "")
        bare = build_prompt(
            aspect,
            assignment.rubric,
            assignment.solution,
            assignment.template,
            Submission("", "", ()),
            fence,
            asks_together=self._asks_together,
            examples=assignment.examples,
        )
        question_texts = [question.suffix[0].text for question in self._questions.get(aspect, {}).values()]
        # This margin is for the headings of parts, the remarks about cuts, and the chat template.
        margin = 256 + model.context // 16
        fixed_tokens = estimate_tokens(
            prompt_text(bare) + max(question_texts, key=len, default=""), model.letters_per_token
        )
        space = model.context - self._samplings[aspect].max_tokens - fixed_tokens - margin
        if space < 128:
            raise ConfigError(
                f"model {model.name!r} has no room for a submission. Its context is {model.context:,} tokens. "
                f"Rubric, solution and template take about {fixed_tokens:,} tokens, and the answer takes up to "
                f"{self._samplings[aspect].max_tokens:,}. Use a model "
                "with a larger context, or a shorter solution or template"
            )
        return space


# --- the cost of a planned regrade


@dataclass(frozen=True, slots=True)
class Cost:
    """What a regrade will ask.

    Token counts are estimates: those of prompts, and of answers at their greatest length.
    """

    # What the regrade asks about again: ids of criteria, and names of other questions. A job without questions asks
    # about everything.
    asked: tuple[str, ...]
    removed: tuple[str, ...]  # criteria that are no longer in the rubric
    submissions: int
    jobs: int
    questions: int
    prompt_tokens: int
    answer_tokens: int
    # Number of answer tokens if every question were asked about every submission of the class.
    all_answer_tokens: int
    answered: int = 0  # number of jobs that an unfinished round has already answered; `jobs` does not count them

    @property
    def is_fully_answered(self) -> bool:
        """Whether a round has all the answers, so that nothing is left to ask."""
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
    """Compute what a batch still has to ask about this class's work.

    Args:
        entries: the batch's jobs.
        succeeded_ids: ids of jobs that have an answer.
        graded_criteria: ids of the criteria for which the class has grades.
        answered_ids: ids of jobs that a round has answered. They belong to the change, but cost nothing.
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

"""Grading a folder: from submissions to jobs, and from results to grades."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from messages.errors import ConfigError
from messages.jobs import JobError, JobResult, Sampling, job_id
from producers.alarms import class_alarms
from producers.answers import AnswerError, ParsedAnswer, answer_schema, max_answer_tokens
from producers.batch import Batch, Entry
from producers.checks import Finding, run_checks
from producers.graded import GradedClass
from producers.grading import Grade, grade_submission
from producers.order import expected_work
from producers.prompts import RULES, Prompt, build_prompt, fence_for, text_of, versions
from producers.pseudonyms import pseudonym, pseudonymise
from producers.quotes import Private, private
from producers.rubric import ROLES, Role, Rubric, load_rubric
from producers.samples import parse_samples
from producers.submissions import Submission, read_document, read_submissions
from producers.tokens import LETTERS_PER_TOKEN, estimate_tokens
from producers.truncation import Cut, Limits, truncate

# Several answers at temperature 0 would be one answer several times.
SAMPLES_TEMPERATURE = 0.3


@dataclass(frozen=True, slots=True)
class RoleModel:
    """The model that plays a role, and how it samples."""

    name: str
    context: int  # tokens; prompts and answers are planned for it
    temperature: float = 0.0
    top_p: float = 0.9
    letters_per_token: float = LETTERS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """What to grade, by what, with which models."""

    folder: Path
    rubric: Path
    models: Mapping[Role, RoleModel]
    solution: Path | None = None
    template: Path | None = None
    only: tuple[str, ...] = ()
    limit: int = 0
    limits: Limits = field(default_factory=Limits)
    samples: int = 1  # answers to each prompt, from one prefill; where they disagree a person looks


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt of one submission."""

    role: Role
    model: str
    prompt: Prompt
    sampling: Sampling
    item_id: str
    job_id: str


@dataclass(frozen=True, slots=True)
class Item:
    """One submission, cut to size, with its tasks. None if it can't be read or is empty."""

    submission: Submission
    cuts: tuple[Cut, ...]
    tasks: tuple[Task, ...]
    item_id: str
    findings: tuple[Finding, ...] = ()
    fence: str = ""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A class's work, read and cut and turned into prompts."""

    request: GradeRequest
    rubric: Rubric
    items: tuple[Item, ...]
    solution: Submission | None = None
    template: Submission | None = None

    @property
    def tasks(self) -> list[Task]:
        """All prompts, the code role's first: its model is the slower to prefill. Longest first in each."""
        tasks = [task for item in self.items for task in item.tasks]
        tasks.sort(key=lambda task: expected_work(task.prompt, task.sampling), reverse=True)
        return [task for role in ROLES for task in tasks if task.role == role]


def prepare(request: GradeRequest, batch_id: str, secret: bytes) -> Assignment:
    """Read everything and build every prompt. Deterministic for a batch: a rerun finds the same job ids.

    Raises RubricError, SubmissionError (folder, solution or template unusable), ConfigError.
    """
    rubric = load_rubric(request.rubric)
    solution = read_document(request.solution) if request.solution else None
    template = read_document(request.template) if request.template else None
    submissions = pseudonymise(read_submissions(request.folder, request.only, request.limit), secret)
    return assign(request, rubric, solution, template, submissions, batch_id, secret)


def assign(
    request: GradeRequest,
    rubric: Rubric,
    solution: Submission | None,
    template: Submission | None,
    submissions: Iterable[Submission],
    batch_id: str,
    secret: bytes,
) -> Assignment:
    """The prompts of submissions that have been read; of `request` its models, limits and samples are used."""
    maker = _PromptMaker(request, rubric, solution, template, batch_id, secret)
    items = tuple(maker.item(submission) for submission in submissions)
    return Assignment(request, rubric, items, solution, template)


def plan(batch: Batch, assignment: Assignment) -> None:
    """Write the manifest, and the failed results of what could not be read, before anything is published."""
    entries = [
        Entry(task.job_id, task.item_id, task.model, task.role, item.submission.name)
        for item in assignment.items
        for task in item.tasks
    ]
    unreadable = [item for item in assignment.items if item.submission.problem]
    model = next(iter(assignment.request.models.values())).name
    failures = [_intake_failure(batch, item, model) for item in unreadable]
    entries += [
        Entry(result.job_id, result.item_id, model, "intake", item.submission.name)
        for result, item in zip(failures, unreadable, strict=True)
    ]
    batch.plan(entries, describe(assignment.request))
    if failures:
        batch.journal.record(failures)


def grades(assignment: Assignment, result_of: Callable[[str], JobResult | None]) -> list[Grade]:
    """The grade of each submission, from what its jobs have produced so far."""
    hidden = private(_secrets(assignment), _known(assignment))
    return [_grade(assignment.rubric, item, result_of, hidden) for item in assignment.items]


def _secrets(assignment: Assignment) -> list[str]:
    """What no feedback may repeat."""
    solution = assignment.solution.parts if assignment.solution else ()
    return [RULES, *(criterion.guidance for criterion in assignment.rubric.criteria), *(part.text for part in solution)]


def _known(assignment: Assignment) -> list[str]:
    """What the students have been given."""
    template = assignment.template.parts if assignment.template else ()
    titles = [criterion.title for criterion in assignment.rubric.criteria]
    return [assignment.rubric.instructions, *titles, *(part.text for part in template)]


def graded_class(batch_id: str, assignment: Assignment, made: Sequence[Grade]) -> GradedClass:
    """What the batch's folder keeps of the class's grades."""
    rubric = assignment.rubric
    used = dict(versions(rubric, assignment.solution, assignment.template))
    return GradedClass(batch_id, rubric.title, rubric.total, tuple(made), used, class_alarms(made, rubric))


def describe(request: GradeRequest) -> dict[str, object]:
    """The request as JSON, so that `kvasir retry` and `watch` can build the same prompts again."""
    paths = {key: str(path.resolve()) if (path := getattr(request, key)) else "" for key in _PATHS}
    models = {role: model.name for role, model in request.models.items()}
    return {**paths, "models": models, "only": list(request.only), "limit": request.limit, "samples": request.samples}


_PATHS = ("folder", "rubric", "solution", "template")


class _PromptMaker:
    """Builds the items of one class: everything that is the same for all of them is computed once."""

    def __init__(
        self,
        request: GradeRequest,
        rubric: Rubric,
        solution: Submission | None,
        template: Submission | None,
        batch_id: str,
        secret: bytes,
    ) -> None:
        self._request = request
        self._rubric = rubric
        self._solution = solution
        self._template = template
        self._batch_id = batch_id
        self._secret = secret
        self._roles = [role for role in ROLES if rubric.for_model(role)]
        self._samplings = {role: self._sampling(role) for role in self._roles}
        self._limits = self._fitting_limits()

    def item(self, submission: Submission) -> Item:
        """One submission, cut, with its prompts."""
        item_id = pseudonym(submission.name, self._secret)
        if submission.problem or submission.empty:
            return Item(submission, (), (), item_id)
        short, cuts = truncate(submission, self._limits, self._count)
        fence = fence_for(self._secret, text_of(short))
        solution = self._solution.parts if self._solution else ()
        findings = tuple(run_checks(self._rubric.checks, submission.parts, solution))
        tasks = tuple(self._task(role, short, cuts, fence, item_id, findings) for role in self._roles)
        return Item(submission, cuts, tasks, item_id, findings, fence)

    def _task(
        self,
        role: Role,
        submission: Submission,
        cuts: tuple[Cut, ...],
        fence: str,
        item_id: str,
        findings: tuple[Finding, ...],
    ) -> Task:
        graded_here = {"", *(criterion.id for criterion in self._rubric.for_model(role))}
        said = [finding.text for finding in findings if finding.criterion in graded_here]
        prompt = build_prompt(role, self._rubric, self._solution, self._template, submission, fence, cuts, said)
        model, sampling = self._request.models[role].name, self._samplings[role]
        task_id = f"{item_id}.{role}"
        return Task(
            role,
            model,
            prompt,
            sampling,
            task_id,
            job_id(self._batch_id, task_id, model, prompt.shared + prompt.own, sampling),
        )

    def _sampling(self, role: Role) -> Sampling:
        """Bounded so that a constrained answer always closes, as far as the model's context allows."""
        model = self._request.models[role]
        schema = answer_schema(self._rubric.for_model(role), with_summary=role == "feedback")
        worst = max_answer_tokens(schema)
        likely = max_answer_tokens(schema, char_bytes=1, space_bytes=1)
        return Sampling(
            min(worst, max(likely, model.context // 2)),
            model.temperature if self._request.samples == 1 else max(model.temperature, SAMPLES_TEMPERATURE),
            model.top_p,
            answers=self._request.samples,
            json_schema=json.dumps(schema, separators=(",", ":"), ensure_ascii=False),
        )

    def _fitting_limits(self) -> Limits:
        """The wanted limits, scaled down where a model's context has no room for them."""
        wanted = self._request.limits
        total = wanted.code_tokens + wanted.text_tokens + wanted.output_tokens
        share = min([1.0, *(self._room(role) / total for role in self._roles)])
        return replace(
            wanted,
            code_tokens=int(wanted.code_tokens * share),
            text_tokens=int(wanted.text_tokens * share),
            output_tokens=int(wanted.output_tokens * share),
        )

    def _room(self, role: Role) -> int:
        """Tokens that a student's part may have with this role's model."""
        model = self._request.models[role]
        blank = Submission("", "", ())
        bare = build_prompt(role, self._rubric, self._solution, self._template, blank, fence_for(self._secret, ""))
        # Headings of parts, remarks on cuts, and the chat template around it all.
        margin = 256 + model.context // 16
        fixed = estimate_tokens(bare.shared + bare.own, model.letters_per_token)
        room = model.context - self._samplings[role].max_tokens - fixed - margin
        if room < 128:
            raise ConfigError(
                f"model {model.name!r} has a context of {model.context:,} tokens; rubric, solution and template take "
                f"about {fixed:,} and the answer up to {self._samplings[role].max_tokens:,}, which leaves no room for "
                "a submission: use a model with a larger context, or a shorter solution or template"
            )
        return room

    def _count(self, text: str) -> int:
        return estimate_tokens(text, min(model.letters_per_token for model in self._request.models.values()))


def _intake_failure(batch: Batch, item: Item, model: str) -> JobResult:
    """The typed result of a submission that can't be read: no job was made of it, but it must not vanish."""
    item_id = f"{item.item_id}.intake"
    reason = item.submission.problem
    error = JobError("intake", "SubmissionError", reason[:2000])
    name = job_id(batch.batch_id, item_id, model, reason, Sampling(1))
    return JobResult(name, 1, batch.batch_id, item_id, model, "failed", error=error)


def _grade(rubric: Rubric, item: Item, result_of: Callable[[str], JobResult | None], hidden: Private) -> Grade:
    answers = {task.role: _answer(rubric, item, task, result_of(task.job_id)) for task in item.tasks}
    name = item.submission.name
    made = grade_submission(name, rubric, answers, item.submission, item.cuts, (), item.findings, hidden)
    return replace(made, item_id=item.item_id)


def _answer(rubric: Rubric, item: Item, task: Task, result: JobResult | None) -> ParsedAnswer | str:
    """The parsed answer, or one sentence that says why there is none."""
    if result is None:
        return "no result yet"
    if result.state != "succeeded":
        return f"{result.state}: {result.error.message}" if result.error else result.state
    # The code around a student's text is nobody's business: an answer that repeats it is read without it.
    texts = [text.replace(item.fence, "…") if item.fence else text for text in (result.text, *result.more_texts)]
    try:
        return parse_samples(texts, rubric.for_model(task.role), with_summary=task.role == "feedback")
    except AnswerError as error:
        return f"the answer of {result.model} can't be used: {error}"

"""Grading a folder: from submissions to jobs, and from results to grades."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from messages.errors import ConfigError
from messages.jobs import JobError, JobResult, Sampling, job_id
from producers.answers import AnswerError, ParsedAnswer, answer_schema, max_answer_tokens, parse_answer
from producers.batch import Batch, Entry
from producers.grading import Grade, grade_submission
from producers.prompts import Prompt, build_prompt, fence_for, text_of
from producers.rubric import ROLES, Role, Rubric, load_rubric
from producers.submissions import Submission, read_document, read_submissions
from producers.tokens import LETTERS_PER_TOKEN, estimate_tokens
from producers.truncation import Cut, Limits, truncate


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """A class's work, read and cut and turned into prompts."""

    request: GradeRequest
    rubric: Rubric
    items: tuple[Item, ...]

    @property
    def tasks(self) -> list[Task]:
        """All prompts, the code role's first: its model is usually the slower to prefill."""
        return [task for role in ROLES for item in self.items for task in item.tasks if task.role == role]


def prepare(request: GradeRequest, batch_id: str, secret: bytes) -> Assignment:
    """Read everything and build every prompt. Deterministic for a batch: a rerun finds the same job ids.

    Raises RubricError, SubmissionError (folder, solution or template unusable), ConfigError.
    """
    rubric = load_rubric(request.rubric)
    solution = read_document(request.solution) if request.solution else None
    template = read_document(request.template) if request.template else None
    submissions = read_submissions(request.folder, request.only, request.limit)
    maker = _PromptMaker(request, rubric, solution, template, batch_id, secret)
    return Assignment(request, rubric, tuple(maker.item(submission) for submission in submissions))


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
    return [_grade(assignment.rubric, item, result_of) for item in assignment.items]


def describe(request: GradeRequest) -> dict[str, object]:
    """The request as JSON, so that `kvasir retry` and `watch` can build the same prompts again."""
    paths = {key: str(path.resolve()) if (path := getattr(request, key)) else "" for key in _PATHS}
    models = {role: model.name for role, model in request.models.items()}
    return {**paths, "models": models, "only": list(request.only), "limit": request.limit}


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
        name = hashlib.blake2b(submission.name.encode(), digest_size=5, key=self._secret, person=b"kvasir.item")
        item_id = name.hexdigest()
        if submission.problem or submission.empty:
            return Item(submission, (), (), item_id)
        short, cuts = truncate(submission, self._limits, self._count)
        fence = fence_for(self._secret, text_of(short))
        return Item(
            submission, cuts, tuple(self._task(role, short, cuts, fence, item_id) for role in self._roles), item_id
        )

    def _task(self, role: Role, submission: Submission, cuts: tuple[Cut, ...], fence: str, item_id: str) -> Task:
        prompt = build_prompt(role, self._rubric, self._solution, self._template, submission, fence, cuts)
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
            model.temperature,
            model.top_p,
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


def _grade(rubric: Rubric, item: Item, result_of: Callable[[str], JobResult | None]) -> Grade:
    answers = {task.role: _answer(rubric, task, result_of(task.job_id)) for task in item.tasks}
    return grade_submission(item.submission.name, rubric, answers, item.submission, item.cuts)


def _answer(rubric: Rubric, task: Task, result: JobResult | None) -> ParsedAnswer | str:
    """The parsed answer, or one sentence that says why there is none."""
    if result is None:
        return "no result yet"
    if result.state != "succeeded":
        return f"{result.state}: {result.error.message}" if result.error else result.state
    try:
        return parse_answer(result.text, rubric.for_model(task.role), with_summary=task.role == "feedback")
    except AnswerError as error:
        return f"the answer of {result.model} can't be used: {error}"

"""Grading a folder: from submissions to jobs, and from results to grades."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from grading.alarms import class_alarms
from grading.names.pseudonyms import pseudonym, pseudonymise
from grading.order import expected_work
from grading.own_work import common_lines, copied, is_template
from grading.points import EARLIER, KEPT, WAITING, Grade, grade_submission
from grading.prompts.answers import (
    AnswerError,
    CriterionAnswer,
    ParsedAnswer,
    answer_schema,
    max_answer_tokens,
    parse_passage,
    parse_summary,
)
from grading.prompts.prompt import RULES, Prompt, build_prompt, fence_for, text_of, versions
from grading.prompts.questions import PASSAGE, SUMMARY, questions_of
from grading.quotes import Private, private
from grading.report.graded import GradedClass
from grading.rubric.checks import CheckFinding, run_checks
from grading.rubric.rubric import ROLES, Role, Rubric, load_rubric
from grading.samples import parse_criterion_samples, parse_samples
from grading.submissions.lms_names import same_student
from grading.submissions.reading import Submission, given_in, read_document, read_submissions
from grading.submissions.tokens import LETTERS_PER_TOKEN, estimate_tokens
from grading.submissions.truncation import Cut, Limits, truncate
from messages.errors import ConfigError
from messages.jobs import (
    MAX_QUESTION_ANSWERS,
    JobResult,
    Part,
    Question,
    QuestionAnswer,
    Sampling,
    job_id,
    user_prompt,
)
from producers.batch.batch import Batch, BatchEntry
from producers.batch.forms import QUESTION_FORM
from producers.batch.intake import failed_intake
from producers.batch.runner import JobSpec

# Several answers at temperature 0 would be one answer several times.
SAMPLES_TEMPERATURE = 0.3
# All criteria in one answer, or each in an answer of its own, from one KV cache.
AskForm = Literal["together", "criteria"]
ASK_FORMS: tuple[AskForm, ...] = ("together", "criteria")
_KEY_DIGITS = 12


@dataclass(frozen=True, slots=True)
class RoleModel:
    """The model that plays a role, and how it samples."""

    name: str
    context: int  # tokens; prompts and answers are planned for it
    temperature: float = 0.0
    top_p: float = 0.9
    letters_per_token: float = LETTERS_PER_TOKEN

    def __post_init__(self) -> None:
        if self.context < 1 or not 0.1 <= self.letters_per_token <= 100:  # a batch's folder may be damaged
            raise ValueError(f"{self.name} can't have {self.context} tokens of {self.letters_per_token} letters")


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
    samples: int = 1  # answers to each prompt, from one prefill; where they disagree a person looks
    ask: AskForm = "together"
    beside: tuple[str, ...] | None = ()  # names of the class's submissions that this run leaves alone; None: all others
    again: bool = False  # as a manifest keeps it: `only` are the names of the class so far, and some may be gone

    @property
    def given(self) -> dict[str, str]:
        """What lies among the submissions and is none, as `given_in` has it."""
        others = {"the rubric": self.rubric, "the solution": self.solution, "the template": self.template}
        return given_in(self.folder, others)

    def read(self, only: Collection[str] = (), limit: int = 0, lenient: bool = False) -> list[Submission]:
        """The submissions. Raises SubmissionError."""
        return read_submissions(self.folder, only, limit, lenient, self.given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(JobSpec):
    """One prompt of one submission. Without questions it asks for all criteria at once."""

    role: Role
    prompt: Prompt  # `parts`, as they are counted and shown
    asked: tuple[str, ...] = ()  # a key for each question, as `BatchEntry` has it
    asking: tuple[Question | None, ...] = ()  # each of them; None: its answer is of no use any more

    def answered(self, result: JobResult | None) -> Iterator[tuple[str, Question | None, tuple[QuestionAnswer, ...]]]:
        """Each question's name, the question, None if it is of no use any more, and its answers, if there are any."""
        place = 0
        for key, question in zip(self.asked, self.asking, strict=True):
            name, answers, _ = key.split(":")
            yield name, question, result.answers[place : place + int(answers)] if result else ()
            place += int(answers)

    @property
    def may_run(self) -> bool:
        """Whether the job can be made again. One that can't has succeeded, and is kept for some of its answers."""
        return None not in self.asking


@dataclass(frozen=True, slots=True)
class Item:
    """One submission, cut to size, with its tasks. None if it can't be read or is empty."""

    submission: Submission
    cuts: tuple[Cut, ...]
    tasks: tuple[Task, ...]
    item_id: str
    findings: tuple[CheckFinding, ...] = ()
    fence: str = ""
    copied: str = ""  # why it looks like a copy of the solution


@dataclass(frozen=True, slots=True)
class Assignment:
    """A class's work, read and cut and turned into prompts."""

    request: GradeRequest
    rubric: Rubric
    items: tuple[Item, ...]
    solution: Submission | None = None
    template: Submission | None = None
    chosen: frozenset[str] | None = None  # item ids that are graded now; None: all

    @property
    def tasks(self) -> list[Task]:
        """All prompts, the code role's first: its model is the slower to prefill. Longest first in each."""
        tasks = [task for item in self.items for task in item.tasks]
        tasks.sort(key=lambda task: expected_work(task.prompt, task.sampling, task.questions), reverse=True)
        return [task for role in ROLES for task in tasks if task.role == role]


def prepare(
    request: GradeRequest,
    batch_id: str,
    secret: bytes,
    older_form: int | None = None,
    planned: Sequence[BatchEntry] = (),
    succeeded: Container[str] = (),
) -> Assignment:
    """Read everything and build every prompt. Deterministic for a batch: a rerun finds the same job ids.

    Prompts of an older form (`older_form`; None: they are of ours) can't be built again to the byte: of such a batch
    the jobs are those `planned`.
    Questions that a planned job asks, and those that one of those `succeeded` has answered, are not asked again.

    Raises RubricError, SubmissionError (folder, solution or template unusable), ConfigError.
    """
    rubric = load_rubric(request.rubric)
    solution = read_document(request.solution) if request.solution else None
    template = read_document(request.template) if request.template else None
    everybody = request.read()
    few = request.only or request.limit
    some = request.read(request.only, request.limit, request.again) if few else everybody
    chosen = {one.name for one in some}
    # Names are taken out of everybody's texts, whoever is graded: a classmate's may be in one's work.
    form = older_form or QUESTION_FORM
    submissions = [
        one
        for one in pseudonymise(everybody, secret, form)
        if one.name in chosen or request.beside is None or one.name in request.beside
    ]
    made = assign(request, rubric, solution, template, submissions, batch_id, secret, planned, succeeded, form)
    made = _as_planned(made, planned) if older_form else made
    return replace(made, chosen=frozenset(pseudonym(name, secret) for name in chosen))


def assign(
    request: GradeRequest,
    rubric: Rubric,
    solution: Submission | None,
    template: Submission | None,
    submissions: Iterable[Submission],
    batch_id: str,
    secret: bytes,
    planned: Sequence[BatchEntry] = (),
    succeeded: Container[str] = (),
    form: int = QUESTION_FORM,
) -> Assignment:
    """The prompts of submissions that have been read; of `request` its models, samples and form are used.

    `form` is that of the questions, where it asks any.
    """
    work = list(submissions)
    if template:
        work = [replace(one, only_template=is_template(one, template)) if not one.empty else one for one in work]
    made = Assignment(request, rubric, (), solution, template)
    maker = _PromptMaker(made, batch_id, secret, common_lines(work), _Earlier(planned, succeeded), form)
    return replace(made, items=tuple(maker.item(submission) for submission in work))


def beside(batch: Batch) -> tuple[str, ...] | None:
    """Who is in the batch's class already, as `GradeRequest.beside` wants it."""
    kept = batch.request
    whole = kept and not (kept.get("only") or kept.get("limit"))
    return None if whole else tuple({*kept.get("only", ()), *(entry.name for entry in batch.entries)})


def unfinished(batch: Batch, assignment: Assignment, kept: GradedClass | None) -> Assignment:
    """With those chosen of whom some job has not succeeded, for whatever reason, or of whom nothing is known."""
    results = {entry.job_id: batch.result(entry.job_id) for entry in batch.entries}
    done = {job for job, result in results.items() if result and result.state == "succeeded"}
    left = {entry.item_id.rpartition(".")[0] for entry in batch.entries if entry.job_id not in done}
    # By item ids: a look keeps the grade of work under a new name, and leaves the work to be graded all the same.
    known = {grade.item_id for grade in kept.grades if not grade.nothing_yet} if kept else set()
    new = {item.item_id for item in assignment.items if item.item_id not in known}
    left |= {item.item_id for item in assignment.items if any(task.job_id not in done for task in item.tasks)} & new
    return replace(assignment, chosen=frozenset(left))


def _as_planned(assignment: Assignment, planned: Iterable[BatchEntry]) -> Assignment:
    """With the ids under which its jobs were published; what was handed in since is none of the batch's."""
    ids = {entry.item_id: entry.job_id for entry in planned}
    items = []
    for item in assignment.items:
        tasks = tuple(replace(task, job_id=ids[task.item_id]) for task in item.tasks if task.item_id in ids)
        items += [replace(item, tasks=tasks)] if tasks or not item.tasks else []
    return replace(assignment, items=tuple(items))


def plan(batch: Batch, assignment: Assignment) -> None:
    """Write the manifest, and the failed results of what could not be read, before anything is published.

    Of submissions that are not chosen the jobs stay as they were planned.
    """
    chosen = [item for item in assignment.items if assignment.chosen is None or item.item_id in assignment.chosen]
    entries = [
        BatchEntry(task.job_id, task.item_id, task.model, task.role, item.submission.name, task.asked)
        for item in chosen
        for task in item.tasks
    ]
    model = next(iter(assignment.request.models.values())).name
    unreadable = [
        failed_intake(batch, f"{item.item_id}.intake", model, item.submission.name, "SubmissionError", why)
        for item in chosen
        if (why := item.submission.problem)
    ]
    entries += [entry for entry, _ in unreadable]
    batch.plan(*_with_others(batch, assignment, entries, chosen))
    if unreadable:
        batch.journal.record(result for _, result in unreadable)


def _with_others(
    batch: Batch, assignment: Assignment, entries: list[BatchEntry], chosen: Sequence[Item]
) -> tuple[list[BatchEntry], dict[str, object], list[BatchEntry]]:
    """What `Batch.plan` is given: a run of a part of the class leaves the others' jobs, and doesn't wait for them."""
    request = assignment.request
    described = describe(request) | {"title": assignment.rubric.title, "out": str(batch.folder.resolve())}
    mine = {same_student(item.submission.name) for item in chosen}
    others = [entry for entry in batch.entries if same_student(entry.name) not in mine]
    if request.again:
        return [*(entry for entry in others if batch.result(entry.job_id)), *entries], described, []
    if not (request.only or request.limit):
        return entries, described, []
    whole = request.beside is None
    names = [] if whole else sorted({*(request.beside or ()), *(item.submission.name for item in chosen)})
    return entries, described | {"only": names, "limit": 0}, others


def grades(
    assignment: Assignment,
    result_of: Callable[[str], JobResult | None],
    planned: Container[str] | None = None,
    kept: GradedClass | None = None,
) -> list[Grade]:
    """The grade of each submission, from what its jobs have produced so far.

    Args:
        planned: ids of the batch's jobs; None: all are.
        kept: the grades last written. They stay where the jobs that would be made now are not in the plan, also if the
            student's work is called otherwise now.
    """
    notes = (criterion.guidance for criterion in assignment.rubric.criteria)
    hidden = private(_secrets(assignment), _known(assignment), notes)
    before = {same_student(made.submission): made for made in kept.grades if not made.nothing_yet} if kept else {}
    now = dict(_versions(assignment))
    made = []
    for item in assignment.items:
        name = item.submission.name
        old = before.get(same_student(name))
        if kept and old and planned is not None and not all(task.job_id in planned for task in item.tasks):
            made.append(_as_before(replace(old, submission=name), kept.versions, now))
        else:
            made.append(replace(_grade(assignment.rubric, item, result_of, hidden), versions=now))
    return made


def _as_before(old: Grade, of_class: Mapping[str, str], now: Mapping[str, str], same: str = KEPT) -> Grade:
    """A grade that stays, with the remark that says why; `same`: the remark where rubric and all are as they were."""
    # Written when only the class had versions, a grade has the class's, or is known to have others.
    versions = old.versions or ({} if EARLIER in old.remarks else of_class)
    remark = same if versions == now else EARLIER
    others = [each for each in old.remarks if each not in (KEPT, EARLIER)]
    return replace(old, remarks=(*others, *([remark] if remark else [])), versions=versions)


def with_those_gone(assignment: Assignment, made: Sequence[Grade], kept: GradedClass | None) -> list[Grade]:
    """Also the grades of submissions that have left the folder since: a part's run, or a look, must not lose them.

    One that nothing has come of was never graded, and is nobody.
    """
    request = assignment.request
    if not kept or not (request.again or request.only or request.limit):
        return list(made)
    there, now = {same_student(grade.submission) for grade in made}, dict(_versions(assignment))
    gone = [
        _as_before(grade, kept.versions, now, KEPT if KEPT in grade.remarks else "")
        for grade in kept.grades
        if same_student(grade.submission) not in there and not grade.nothing_yet
    ]
    return sorted([*made, *gone], key=lambda grade: grade.submission)


def _secrets(assignment: Assignment) -> list[str]:
    """What no feedback may repeat."""
    solution = assignment.solution.parts if assignment.solution else ()
    return [RULES, *(criterion.guidance for criterion in assignment.rubric.criteria), *(part.text for part in solution)]


def _known(assignment: Assignment) -> list[str]:
    """What the students have been given."""
    template = assignment.template.parts if assignment.template else ()
    titles = [criterion.title for criterion in assignment.rubric.criteria]
    return [assignment.rubric.instructions, *titles, *(part.text for part in template)]


def graded_class(
    batch_id: str, assignment: Assignment, made: Sequence[Grade], kept: GradedClass | None = None
) -> GradedClass:
    """What the batch's folder keeps of the class's grades; `kept` as in `grades`."""
    rubric = assignment.rubric
    by_models = [grade for grade in made if grade.state != "empty" and not grade.unreadable]
    earlier = kept and by_models and all(EARLIER in grade.remarks for grade in by_models)
    used = kept.versions if kept and earlier else dict(_versions(assignment))
    return GradedClass(batch_id, rubric.title, rubric.total, tuple(made), used, class_alarms(made, rubric), rubric.late)


def _versions(assignment: Assignment) -> list[tuple[str, str]]:
    return versions(assignment.rubric, assignment.solution, assignment.template)


def describe(request: GradeRequest) -> dict[str, object]:
    """The request as JSON, so that `kvasir retry` and `watch` can build the same prompts again."""
    paths = {key: str(path.resolve()) if (path := getattr(request, key)) else "" for key in _PATHS}
    models = {role: model.name for role, model in request.models.items()}
    # What prompts were planned for: read again, they are the same although the configuration has changed.
    settings = {role: asdict(model) for role, model in request.models.items()}
    more = {"only": list(request.only), "limit": request.limit, "samples": request.samples, "ask": request.ask}
    return {**paths, "models": models, "settings": settings, **more}


_PATHS = ("folder", "rubric", "solution", "template")


class _Earlier:
    """The jobs that ask questions in a batch already."""

    def __init__(self, planned: Sequence[BatchEntry], succeeded: Container[str]) -> None:
        self._succeeded = succeeded
        self._names = {entry.item_id for entry in planned}
        self._entries: dict[str, list[BatchEntry]] = {}
        for entry in planned:
            if entry.asked:
                item, _, role = entry.item_id.rpartition(".")
                self._entries.setdefault(f"{item}.{role.partition('-')[0]}", []).append(entry)

    def of_use(self, item_id: str, model: str, wanted: Container[str]) -> list[BatchEntry]:
        """Those of this prompt that ask nothing but what is wanted, or have answered some of it."""
        of_use = []
        for entry in self._entries.get(item_id, ()):
            still = [key in wanted for key in entry.asked]
            if entry.model == model and (all(still) or (any(still) and entry.job_id in self._succeeded)):
                of_use.append(entry)
        return of_use

    def free_names(self, item_id: str) -> Iterator[str]:
        """Item ids for further jobs of this prompt."""
        names = (f"{item_id}-{number}" if number > 1 else item_id for number in itertools.count(1))
        return (name for name in names if name not in self._names)


def _in_jobs(wanted: Mapping[str, Question]) -> Iterator[dict[str, Question]]:
    """Questions, as many together as one job may ask."""
    together: dict[str, Question] = {}
    answers = 0
    for key, question in wanted.items():
        answers += question.sampling.answers
        if answers > MAX_QUESTION_ANSWERS:
            yield together
            together, answers = {}, question.sampling.answers
        together[key] = question
    if together:
        yield together


class _PromptMaker:
    """Builds the items of one class: everything that is the same for all of them is computed once."""

    def __init__(
        self, made: Assignment, batch_id: str, secret: bytes, common: Set[str], earlier: _Earlier, form: int
    ) -> None:
        """`made`: the class's, without items; `form`: of the questions."""
        self._form = form
        self._earlier = earlier
        self._with_criteria = made.request.ask == "together"
        self._made = made
        self._batch_id = batch_id
        self._secret = secret
        self._common = common
        self._roles = [role for role in ROLES if made.rubric.for_model(role)]
        if missing := [role for role in self._roles if role not in made.request.models]:
            raise ConfigError(
                f"the rubric needs a {missing[0]} model, and this batch names none: use kvasir grade again"
            )
        self._questions = {role: self._asked(role) for role in self._roles if not self._with_criteria}
        self._samplings = {role: self._longest(role) for role in self._roles}
        self._limits = self._fitting_limits()

    def item(self, submission: Submission) -> Item:
        """One submission, cut, with its prompts."""
        made = self._made
        item_id = pseudonym(submission.name, self._secret)
        if submission.problem or submission.empty:
            return Item(submission, (), (), item_id)
        letters = min(model.letters_per_token for model in made.request.models.values())
        short, cuts = truncate(submission, self._limits, lambda text: estimate_tokens(text, letters))
        fence = fence_for(self._secret, text_of(short))
        solution = made.solution.parts if made.solution else ()
        findings = tuple(run_checks(made.rubric.checks, submission.parts, solution, submission.language))
        tasks = []
        for role in self._roles:
            graded_here = {"", *(criterion.id for criterion in made.rubric.for_model(role))}
            said = [finding.text for finding in findings if finding.criterion in graded_here]
            prompt = build_prompt(
                role,
                made.rubric,
                made.solution,
                made.template,
                short,
                fence,
                cuts,
                said,
                with_criteria=self._with_criteria,
            )
            tasks += self._tasks(role, prompt, f"{item_id}.{role}")
        likeness = copied(submission, made.rubric, made.solution, made.template, self._common)
        return Item(submission, cuts, tuple(tasks), item_id, findings, fence, likeness)

    def _tasks(self, role: Role, prompt: Prompt, item_id: str) -> list[Task]:
        """The role's prompt of one submission: one job, or those that ask all of its questions."""
        model, sampling = self._made.request.models[role].name, self._samplings[role]
        parts = user_prompt(prompt.shared, prompt.own)
        task = partial(Task, model=model, parts=parts, sampling=sampling, role=role, prompt=prompt)
        if self._with_criteria:
            job = job_id(self._batch_id, item_id, model, parts, sampling)
            return [task(job, item_id)]
        wanted = {}
        for name, question in self._questions[role]:
            digest = job_id(self._batch_id, item_id, model, parts, Sampling(1), [question])[:_KEY_DIGITS]
            wanted[f"{name}:{question.sampling.answers}:{digest}"] = question
        tasks = []
        for entry in self._earlier.of_use(item_id, model, wanted):
            asking = tuple(wanted.get(key) for key in entry.asked)
            of_use = tuple(question for question in asking if question)
            tasks.append(task(entry.job_id, entry.item_id, questions=of_use, asked=entry.asked, asking=asking))
        done = {key for one in tasks for key in one.asked}
        names = self._earlier.free_names(item_id)
        for asked in _in_jobs({key: question for key, question in wanted.items() if key not in done}):
            name, questions = next(names), tuple(asked.values())
            job = job_id(self._batch_id, name, model, parts, sampling, questions)
            tasks.append(task(job, name, questions=questions, asked=tuple(asked), asking=questions))
        return tasks

    def _asked(self, role: Role) -> list[tuple[str, Question]]:
        """The role's questions, by name. Only of a criterion several answers are wanted."""
        made = []
        for one in questions_of(role, self._made.rubric, self._form):
            sampling = self._sampling(role, one.schema, self._made.request.samples if one.is_criterion else 1)
            made.append((one.name, Question((Part("user", one.text),), sampling)))
        return made

    def _longest(self, role: Role) -> Sampling:
        """Of the role's answers, the longest."""
        if not self._with_criteria:
            return max((one.sampling for _, one in self._questions[role]), key=lambda sampling: sampling.max_tokens)
        schema = answer_schema(self._made.rubric.for_model(role), with_summary=role == "feedback")
        return self._sampling(role, schema, self._made.request.samples)

    def _sampling(self, role: Role, schema: Mapping[str, Any], answers: int) -> Sampling:
        """Bounded so that a constrained answer always closes, as far as the model's context allows."""
        model = self._made.request.models[role]
        worst = max_answer_tokens(schema)
        likely = max_answer_tokens(schema, char_bytes=1, space_bytes=1)
        return Sampling(
            min(worst, max(likely, model.context // 2)),
            model.temperature if answers == 1 else max(model.temperature, SAMPLES_TEMPERATURE),
            model.top_p,
            answers=answers,
            json_schema=json.dumps(schema, separators=(",", ":"), ensure_ascii=False),
        )

    def _fitting_limits(self) -> Limits:
        """The usual limits, scaled down where a model's context has no room for them."""
        wanted = Limits()
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
        model = self._made.request.models[role]
        blank = Submission("", "", ())
        made, fence = self._made, fence_for(self._secret, "")
        bare = build_prompt(
            role, made.rubric, made.solution, made.template, blank, fence, with_criteria=self._with_criteria
        )
        asked = [one.suffix[0].text for _, one in self._questions.get(role, ())]
        # Headings of parts, remarks on cuts, and the chat template around it all.
        margin = 256 + model.context // 16
        fixed = estimate_tokens(bare.shared + bare.own + max(asked, key=len, default=""), model.letters_per_token)
        room = model.context - self._samplings[role].max_tokens - fixed - margin
        if room < 128:
            raise ConfigError(
                f"model {model.name!r} has a context of {model.context:,} tokens; rubric, solution and template take "
                f"about {fixed:,} and the answer up to {self._samplings[role].max_tokens:,}, which leaves no room for "
                "a submission: use a model with a larger context, or a shorter solution or template"
            )
        return room


def _grade(rubric: Rubric, item: Item, result_of: Callable[[str], JobResult | None], hidden: Private) -> Grade:
    answers: dict[Role, ParsedAnswer | str] = {}
    for role in dict.fromkeys(task.role for task in item.tasks):
        answered = [(task, result_of(task.job_id)) for task in item.tasks if task.role == role]
        (task, result), *_ = answered
        asks = bool(task.asked)
        answers[role] = _answers(rubric, item, answered) if asks else _answer(rubric, item, task, result)
    name = item.submission.name
    made = grade_submission(name, rubric, answers, item.submission, item.cuts, item.findings, hidden, item.copied)
    return replace(made, item_id=item.item_id)


def _answer(rubric: Rubric, item: Item, task: Task, result: JobResult | None) -> ParsedAnswer | str:
    """The parsed answer, or one sentence that says why there is none."""
    if result is None:
        return WAITING
    if result.state != "succeeded":
        return f"{result.state}: {result.error.message}" if result.error else result.state
    texts = [_without_fence(item, text) for text in (result.text, *result.more_texts)]
    try:
        return parse_samples(texts, rubric.for_model(task.role), with_summary=task.role == "feedback")
    except AnswerError as error:
        return f"the answer of {result.model} can't be used: {error}"


def _answers(rubric: Rubric, item: Item, answered: Sequence[tuple[Task, JobResult | None]]) -> ParsedAnswer | str:
    """What the jobs that ask a role's questions have answered together."""
    criteria: dict[str, CriterionAnswer] = {}
    missing: dict[str, str] = {}
    summary, passage = "", None
    for task, result in answered:
        if result is None:
            return WAITING
        for name, answers in _answers_by_name(item, task, result):
            try:
                if isinstance(answers, str):
                    missing[name] = answers
                elif name == SUMMARY:
                    summary = parse_summary(answers[0].text)
                elif name == PASSAGE:
                    passage = parse_passage(answers[0].text, answers[0].likelihoods)
                else:
                    asked = next(each for each in rubric.criteria if each.id == name)
                    criteria[name] = parse_criterion_samples(answers, asked)
            except AnswerError as error:
                missing[name] = f"the answer of {result.model} can't be used: {error}"
    return ParsedAnswer(criteria, summary, missing, missing.pop(SUMMARY, ""), passage)


def _answers_by_name(item: Item, task: Task, result: JobResult) -> Iterator[tuple[str, list[QuestionAnswer] | str]]:
    """For each question that is still asked, its answers, or one sentence that says why there is none."""
    why = f"{result.state}: {result.error.message}" if result.error else result.state
    for name, question, answers in task.answered(result):
        if question:
            said = [replace(answer, text=_without_fence(item, answer.text)) for answer in answers]
            yield name, said if result.state == "succeeded" and said else why


def _without_fence(item: Item, text: str) -> str:
    """The code around a student's text is nobody's business: an answer that repeats it is read without it."""
    return text.replace(item.fence, "…") if item.fence else text

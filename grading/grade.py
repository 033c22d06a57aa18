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
from grading.own_work import common_lines, copy_reason, is_template
from grading.points import EARLIER_REMARK, KEPT_REMARK, NO_RESULT_YET, Grade, grade_submission
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
from grading.quotes import PrivateTexts, private_texts
from grading.report.graded import GradedClass
from grading.rubric.checks import CheckFinding, run_checks
from grading.rubric.rubric import ASPECTS, Aspect, Rubric, load_rubric
from grading.samples import parse_criterion_samples, parse_samples
from grading.submissions.lms_names import same_student
from grading.submissions.reading import Submission, inputs_inside, read_document, read_submissions
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
class AspectModel:
    """The model that grades one aspect, and how it samples."""

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
    models: Mapping[Aspect, AspectModel]
    solution: Path | None = None
    template: Path | None = None
    only_names: tuple[str, ...] = ()
    limit: int = 0
    samples: int = 1  # answers to each prompt, from one prefill; where they disagree a person looks
    ask: AskForm = "together"
    # Of the class's submissions those that this run leaves alone; "all": all that it does not grade.
    untouched_names: tuple[str, ...] | Literal["all"] = ()
    from_manifest: bool = False  # `only_names` are the names of the class so far then, and some may be gone

    @property
    def excluded_paths(self) -> dict[str, str]:
        """What lies among the submissions and is none, as `inputs_inside` has it."""
        documents = {"the rubric": self.rubric, "the solution": self.solution, "the template": self.template}
        return inputs_inside(self.folder, documents)

    def read(self, names: Collection[str] = (), limit: int = 0, lenient: bool = False) -> list[Submission]:
        """The submissions. Raises SubmissionError."""
        return read_submissions(self.folder, names, limit, lenient, self.excluded_paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(JobSpec):
    """One prompt of one submission. Without questions it asks for all criteria at once."""

    aspect: Aspect
    prompt: Prompt  # `parts`, as they are counted and shown
    question_keys: tuple[str, ...] = ()  # a key for each question, as `BatchEntry` has it
    asked_questions: tuple[Question | None, ...] = ()  # each of them; None: its answer is of no use any more

    def question_answers(
        self, result: JobResult | None
    ) -> Iterator[tuple[str, Question | None, tuple[QuestionAnswer, ...]]]:
        """Each question's name, the question, None if it is of no use any more, and its answers, if there are any."""
        place = 0
        for key, question in zip(self.question_keys, self.asked_questions, strict=True):
            name, answers, _ = key.split(":")
            yield name, question, result.answers[place : place + int(answers)] if result else ()
            place += int(answers)

    @property
    def may_run(self) -> bool:
        """Whether the job can be made again. One that can't has succeeded, and is kept for some of its answers."""
        return None not in self.asked_questions


@dataclass(frozen=True, slots=True)
class Item:
    """One submission, cut to size, with its tasks. None if it can't be read or is empty."""

    submission: Submission
    cuts: tuple[Cut, ...]
    tasks: tuple[Task, ...]
    item_id: str
    findings: tuple[CheckFinding, ...] = ()
    fence: str = ""
    copy_reason: str = ""  # why it looks like a copy of the solution


@dataclass(frozen=True, slots=True)
class Assignment:
    """A class's work, read and cut and turned into prompts."""

    request: GradeRequest
    rubric: Rubric
    items: tuple[Item, ...]
    solution: Submission | None = None
    template: Submission | None = None
    selected_ids: frozenset[str] | None = None  # item ids that are graded now; None: all

    @property
    def tasks(self) -> list[Task]:
        """All prompts, those about code first: its model is the slower to prefill. Longest first in each."""
        tasks = [task for item in self.items for task in item.tasks]
        tasks.sort(key=lambda task: expected_work(task.prompt, task.sampling, task.questions), reverse=True)
        return [task for aspect in ASPECTS for task in tasks if task.aspect == aspect]


def prepare(
    request: GradeRequest,
    batch_id: str,
    secret: bytes,
    older_form: int | None = None,
    planned_entries: Sequence[BatchEntry] = (),
    succeeded_ids: Container[str] = (),
) -> Assignment:
    """Read everything and build every prompt. Deterministic for a batch: a rerun finds the same job ids.

    Prompts of an older form (`older_form`; None: they are of ours) can't be built again to the byte: of such a batch
    the jobs are those `planned_entries`.
    Questions that a planned job asks, and those that one of those `succeeded_ids` has answered, are not asked again.

    Raises RubricError, SubmissionError (folder, solution or template unusable), ConfigError.
    """
    rubric = load_rubric(request.rubric)
    solution = read_document(request.solution) if request.solution else None
    template = read_document(request.template) if request.template else None
    all_submissions = request.read()
    selection = request.only_names or request.limit
    selected_submissions = (
        request.read(request.only_names, request.limit, request.from_manifest) if selection else all_submissions
    )
    selected_names = {submission.name for submission in selected_submissions}
    # Names are taken out of everybody's texts, whoever is graded: a classmate's may be in one's work.
    form = older_form or QUESTION_FORM
    submissions = [
        submission
        for submission in pseudonymise(all_submissions, secret, form)
        if submission.name in selected_names
        or request.untouched_names == "all"
        or submission.name in request.untouched_names
    ]
    assignment = assign(
        request, rubric, solution, template, submissions, batch_id, secret, planned_entries, succeeded_ids, form
    )
    assignment = _as_planned(assignment, planned_entries) if older_form else assignment
    return replace(assignment, selected_ids=frozenset(pseudonym(name, secret) for name in selected_names))


def assign(
    request: GradeRequest,
    rubric: Rubric,
    solution: Submission | None,
    template: Submission | None,
    submissions: Iterable[Submission],
    batch_id: str,
    secret: bytes,
    planned_entries: Sequence[BatchEntry] = (),
    succeeded_ids: Container[str] = (),
    form: int = QUESTION_FORM,
) -> Assignment:
    """The prompts of submissions that have been read; of `request` its models, samples and form are used.

    `form` is that of the questions, where it asks any.
    """
    work = list(submissions)
    if template:
        work = [
            replace(submission, only_template=is_template(submission, template)) if not submission.empty else submission
            for submission in work
        ]
    assignment = Assignment(request, rubric, (), solution, template)
    maker = _PromptMaker(
        assignment, batch_id, secret, common_lines(work), _EarlierJobs(planned_entries, succeeded_ids), form
    )
    return replace(assignment, items=tuple(maker.item(submission) for submission in work))


def names_so_far(batch: Batch) -> tuple[str, ...] | Literal["all"]:
    """Who is in the batch's class already, as `GradeRequest.untouched_names` wants it."""
    stored_request = batch.request
    whole = stored_request and not (stored_request.get("only") or stored_request.get("limit"))
    return "all" if whole else tuple({*stored_request.get("only", ()), *(entry.name for entry in batch.entries)})


def select_unfinished(batch: Batch, assignment: Assignment, previous_class: GradedClass | None) -> Assignment:
    """With those chosen of whom some job has not succeeded, for whatever reason, or of whom nothing is known."""
    results = {entry.job_id: batch.result(entry.job_id) for entry in batch.entries}
    succeeded_ids = {job for job, result in results.items() if result and result.state == "succeeded"}
    unfinished_ids = {entry.item_id.rpartition(".")[0] for entry in batch.entries if entry.job_id not in succeeded_ids}
    # By item ids: a look keeps the grade of work under a new name, and leaves the work to be graded all the same.
    graded_ids = (
        {grade.item_id for grade in previous_class.grades if not grade.has_nothing_yet} if previous_class else set()
    )
    new = {item.item_id for item in assignment.items if item.item_id not in graded_ids}
    unfinished_ids |= {
        item.item_id for item in assignment.items if any(task.job_id not in succeeded_ids for task in item.tasks)
    } & new
    return replace(assignment, selected_ids=frozenset(unfinished_ids))


def _as_planned(assignment: Assignment, planned_entries: Iterable[BatchEntry]) -> Assignment:
    """With the ids under which its jobs were published; what was handed in since is none of the batch's."""
    ids = {entry.item_id: entry.job_id for entry in planned_entries}
    items = []
    for item in assignment.items:
        tasks = tuple(replace(task, job_id=ids[task.item_id]) for task in item.tasks if task.item_id in ids)
        items += [replace(item, tasks=tasks)] if tasks or not item.tasks else []
    return replace(assignment, items=tuple(items))


def plan(batch: Batch, assignment: Assignment) -> None:
    """Write the manifest, and the failed results of what could not be read, before anything is published.

    Of submissions that are not chosen the jobs stay as they were planned.
    """
    selected_items = [
        item for item in assignment.items if assignment.selected_ids is None or item.item_id in assignment.selected_ids
    ]
    entries = [
        BatchEntry(task.job_id, task.item_id, task.model, task.aspect, item.submission.name, task.question_keys)
        for item in selected_items
        for task in item.tasks
    ]
    model = next(iter(assignment.request.models.values())).name
    unreadable = [
        failed_intake(batch, f"{item.item_id}.intake", model, item.submission.name, "SubmissionError", problem)
        for item in selected_items
        if (problem := item.submission.problem)
    ]
    entries += [entry for entry, _ in unreadable]
    batch.plan(*_with_others(batch, assignment, entries, selected_items))
    if unreadable:
        batch.journal.record(result for _, result in unreadable)


def _with_others(
    batch: Batch, assignment: Assignment, entries: list[BatchEntry], selected_items: Sequence[Item]
) -> tuple[list[BatchEntry], dict[str, object], list[BatchEntry]]:
    """What `Batch.plan` is given: a run of a part of the class leaves the others' jobs, and doesn't wait for them."""
    request = assignment.request
    description = describe(request) | {"title": assignment.rubric.title, "out": str(batch.folder.resolve())}
    selected_students = {same_student(item.submission.name) for item in selected_items}
    other_entries = [entry for entry in batch.entries if same_student(entry.name) not in selected_students]
    if request.from_manifest:
        return [*(entry for entry in other_entries if batch.result(entry.job_id)), *entries], description, []
    if not (request.only_names or request.limit):
        return entries, description, []
    whole = request.untouched_names == "all"
    names = [] if whole else sorted({*request.untouched_names, *(item.submission.name for item in selected_items)})
    return entries, description | {"only": names, "limit": 0}, other_entries


def grades(
    assignment: Assignment,
    result_of: Callable[[str], JobResult | None],
    planned_ids: Container[str] | None = None,
    previous_class: GradedClass | None = None,
) -> list[Grade]:
    """The grade of each submission, from what its jobs have produced so far.

    Args:
        planned_ids: ids of the batch's jobs; None: all are.
        previous_class: the grades last written. They stay where the jobs that would be made now are not in the plan,
            also if the student's work is called otherwise now.
    """
    notes = (criterion.guidance for criterion in assignment.rubric.criteria)
    hidden = private_texts(_secrets(assignment), _public_texts(assignment), notes)
    old_grades = (
        {same_student(grade.submission): grade for grade in previous_class.grades if not grade.has_nothing_yet}
        if previous_class
        else {}
    )
    now = dict(_versions(assignment))
    new_grades = []
    for item in assignment.items:
        name = item.submission.name
        old = old_grades.get(same_student(name))
        if (
            previous_class
            and old
            and planned_ids is not None
            and not all(task.job_id in planned_ids for task in item.tasks)
        ):
            new_grades.append(_as_before(replace(old, submission=name), previous_class.versions, now))
        else:
            new_grades.append(replace(_grade(assignment.rubric, item, result_of, hidden), versions=now))
    return new_grades


def _as_before(
    old: Grade, of_class: Mapping[str, str], now: Mapping[str, str], unchanged_remark: str = KEPT_REMARK
) -> Grade:
    """A grade that stays, with the remark that says why: `unchanged_remark` where rubric and all are as they were."""
    # Written when only the class had versions, a grade has the class's, or is known to have others.
    versions = old.versions or ({} if EARLIER_REMARK in old.remarks else of_class)
    remark = unchanged_remark if versions == now else EARLIER_REMARK
    other_remarks = [old_remark for old_remark in old.remarks if old_remark not in (KEPT_REMARK, EARLIER_REMARK)]
    return replace(old, remarks=(*other_remarks, *([remark] if remark else [])), versions=versions)


def with_removed_submissions(
    assignment: Assignment, new_grades: Sequence[Grade], previous_class: GradedClass | None
) -> list[Grade]:
    """Also the grades of submissions that have left the folder since: a part's run, or a look, must not lose them.

    One that nothing has come of was never graded, and is nobody.
    """
    request = assignment.request
    if not previous_class or not (request.from_manifest or request.only_names or request.limit):
        return list(new_grades)
    present_students, now = {same_student(grade.submission) for grade in new_grades}, dict(_versions(assignment))
    removed_grades = [
        _as_before(grade, previous_class.versions, now, KEPT_REMARK if KEPT_REMARK in grade.remarks else "")
        for grade in previous_class.grades
        if same_student(grade.submission) not in present_students and not grade.has_nothing_yet
    ]
    return sorted([*new_grades, *removed_grades], key=lambda grade: grade.submission)


def _secrets(assignment: Assignment) -> list[str]:
    """What no feedback may repeat."""
    solution = assignment.solution.parts if assignment.solution else ()
    return [RULES, *(criterion.guidance for criterion in assignment.rubric.criteria), *(part.text for part in solution)]


def _public_texts(assignment: Assignment) -> list[str]:
    """What the students have been given."""
    template = assignment.template.parts if assignment.template else ()
    titles = [criterion.title for criterion in assignment.rubric.criteria]
    return [assignment.rubric.instructions, *titles, *(part.text for part in template)]


def graded_class(
    batch_id: str, assignment: Assignment, new_grades: Sequence[Grade], previous_class: GradedClass | None = None
) -> GradedClass:
    """What the batch's folder keeps of the class's grades; `previous_class` as in `grades`."""
    rubric = assignment.rubric
    by_models = [grade for grade in new_grades if grade.state != "empty" and not grade.is_unreadable]
    earlier = previous_class and by_models and all(EARLIER_REMARK in grade.remarks for grade in by_models)
    version_digests = previous_class.versions if previous_class and earlier else dict(_versions(assignment))
    return GradedClass(
        batch_id,
        rubric.title,
        rubric.total,
        tuple(new_grades),
        version_digests,
        class_alarms(new_grades, rubric),
        rubric.late,
    )


def _versions(assignment: Assignment) -> list[tuple[str, str]]:
    return versions(assignment.rubric, assignment.solution, assignment.template)


def describe(request: GradeRequest) -> dict[str, object]:
    """The request as JSON, so that `kvasir retry` and `watch` can build the same prompts again."""
    paths = {key: str(path.resolve()) if (path := getattr(request, key)) else "" for key in _PATHS}
    models = {aspect: model.name for aspect, model in request.models.items()}
    # What prompts were planned for: read again, they are the same although the configuration has changed.
    settings = {aspect: asdict(model) for aspect, model in request.models.items()}
    options = {"only": list(request.only_names), "limit": request.limit, "samples": request.samples, "ask": request.ask}
    return {**paths, "models": models, "settings": settings, **options}


_PATHS = ("folder", "rubric", "solution", "template")


class _EarlierJobs:
    """The jobs that ask questions in a batch already."""

    def __init__(self, planned_entries: Sequence[BatchEntry], succeeded_ids: Container[str]) -> None:
        self._succeeded_ids = succeeded_ids
        self._names = {entry.item_id for entry in planned_entries}
        self._entries: dict[str, list[BatchEntry]] = {}
        for entry in planned_entries:
            if entry.asked:
                item, _, aspect = entry.item_id.rpartition(".")
                self._entries.setdefault(f"{item}.{aspect.partition('-')[0]}", []).append(entry)

    def usable_entries(self, item_id: str, model: str, requested_keys: Container[str]) -> list[BatchEntry]:
        """Those of this prompt that ask nothing but what is wanted, or have answered some of it."""
        entries = []
        for entry in self._entries.get(item_id, ()):
            requested_flags = [key in requested_keys for key in entry.asked]
            if entry.model == model and (
                all(requested_flags) or (any(requested_flags) and entry.job_id in self._succeeded_ids)
            ):
                entries.append(entry)
        return entries

    def free_names(self, item_id: str) -> Iterator[str]:
        """Item ids for further jobs of this prompt."""
        names = (f"{item_id}-{number}" if number > 1 else item_id for number in itertools.count(1))
        return (name for name in names if name not in self._names)


def _split_into_jobs(questions: Mapping[str, Question]) -> Iterator[dict[str, Question]]:
    """Questions, as many together as one job may ask."""
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


class _PromptMaker:
    """Builds the items of one class: everything that is the same for all of them is computed once."""

    def __init__(
        self, assignment: Assignment, batch_id: str, secret: bytes, common: Set[str], earlier: _EarlierJobs, form: int
    ) -> None:
        """`assignment`: the class's, without items; `form`: of the questions."""
        self._form = form
        self._earlier = earlier
        self._with_criteria = assignment.request.ask == "together"
        self._assignment = assignment
        self._batch_id = batch_id
        self._secret = secret
        self._common = common
        self._aspects = [aspect for aspect in ASPECTS if assignment.rubric.for_model(aspect)]
        if missing_aspects := [aspect for aspect in self._aspects if aspect not in assignment.request.models]:
            raise ConfigError(
                f"the rubric needs a {missing_aspects[0]} model, and this batch names none: use kvasir grade again"
            )
        self._questions = {aspect: self._named_questions(aspect) for aspect in self._aspects if not self._with_criteria}
        self._samplings = {aspect: self._longest_sampling(aspect) for aspect in self._aspects}
        self._limits = self._fitting_limits()

    def item(self, submission: Submission) -> Item:
        """One submission, cut, with its prompts."""
        assignment = self._assignment
        item_id = pseudonym(submission.name, self._secret)
        if submission.problem or submission.empty:
            return Item(submission, (), (), item_id)
        letters = min(model.letters_per_token for model in assignment.request.models.values())
        short, cuts = truncate(submission, self._limits, lambda text: estimate_tokens(text, letters))
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
                with_criteria=self._with_criteria,
            )
            tasks += self._tasks(aspect, prompt, f"{item_id}.{aspect}")
        likeness = copy_reason(submission, assignment.rubric, assignment.solution, assignment.template, self._common)
        return Item(submission, cuts, tuple(tasks), item_id, findings, fence, likeness)

    def _tasks(self, aspect: Aspect, prompt: Prompt, item_id: str) -> list[Task]:
        """The aspect's prompt of one submission: one job, or those that ask all of its questions."""
        model, sampling = self._assignment.request.models[aspect].name, self._samplings[aspect]
        parts = user_prompt(prompt.prefix, prompt.suffix)
        task = partial(Task, model=model, parts=parts, sampling=sampling, aspect=aspect, prompt=prompt)
        if self._with_criteria:
            job = job_id(self._batch_id, item_id, model, parts, sampling)
            return [task(job, item_id)]
        questions_by_key = {}
        for name, question in self._questions[aspect]:
            digest = job_id(self._batch_id, item_id, model, parts, Sampling(1), [question])[:_KEY_DIGITS]
            questions_by_key[f"{name}:{question.sampling.answers}:{digest}"] = question
        tasks = []
        for entry in self._earlier.usable_entries(item_id, model, questions_by_key):
            asked_questions = tuple(questions_by_key.get(key) for key in entry.asked)
            usable_questions = tuple(question for question in asked_questions if question)
            tasks.append(
                task(
                    entry.job_id,
                    entry.item_id,
                    questions=usable_questions,
                    question_keys=entry.asked,
                    asked_questions=asked_questions,
                )
            )
        planned_keys = {key for planned_task in tasks for key in planned_task.question_keys}
        names = self._earlier.free_names(item_id)
        for new_questions in _split_into_jobs(
            {key: question for key, question in questions_by_key.items() if key not in planned_keys}
        ):
            name, questions = next(names), tuple(new_questions.values())
            job = job_id(self._batch_id, name, model, parts, sampling, questions)
            tasks.append(
                task(job, name, questions=questions, question_keys=tuple(new_questions), asked_questions=questions)
            )
        return tasks

    def _named_questions(self, aspect: Aspect) -> list[tuple[str, Question]]:
        """The aspect's questions, by name. Only of a criterion several answers are wanted."""
        named_questions = []
        for question in questions_of(aspect, self._assignment.rubric, self._form):
            sampling = self._sampling(
                aspect, question.schema, self._assignment.request.samples if question.is_criterion else 1
            )
            named_questions.append((question.name, Question((Part("user", question.text),), sampling)))
        return named_questions

    def _longest_sampling(self, aspect: Aspect) -> Sampling:
        """Of the aspect's answers, the longest."""
        if not self._with_criteria:
            return max(
                (question.sampling for _, question in self._questions[aspect]), key=lambda sampling: sampling.max_tokens
            )
        schema = answer_schema(self._assignment.rubric.for_model(aspect), with_summary=aspect == "feedback")
        return self._sampling(aspect, schema, self._assignment.request.samples)

    def _sampling(self, aspect: Aspect, schema: Mapping[str, Any], answers: int) -> Sampling:
        """Bounded so that a constrained answer always closes, as far as the model's context allows."""
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

    def _fitting_limits(self) -> Limits:
        """The usual limits, scaled down where a model's context has no room for them."""
        limits = Limits()
        total = limits.code_tokens + limits.text_tokens + limits.output_tokens
        share = min([1.0, *(self._submission_space(aspect) / total for aspect in self._aspects)])
        return replace(
            limits,
            code_tokens=int(limits.code_tokens * share),
            text_tokens=int(limits.text_tokens * share),
            output_tokens=int(limits.output_tokens * share),
        )

    def _submission_space(self, aspect: Aspect) -> int:
        """Tokens that a student's part may have with this aspect's model."""
        model = self._assignment.request.models[aspect]
        blank = Submission("", "", ())
        assignment, fence = self._assignment, fence_for(self._secret, "")
        bare = build_prompt(
            aspect,
            assignment.rubric,
            assignment.solution,
            assignment.template,
            blank,
            fence,
            with_criteria=self._with_criteria,
        )
        question_texts = [question.suffix[0].text for _, question in self._questions.get(aspect, ())]
        # Headings of parts, remarks on cuts, and the chat template around it all.
        margin = 256 + model.context // 16
        fixed_tokens = estimate_tokens(
            bare.prefix + bare.suffix + max(question_texts, key=len, default=""), model.letters_per_token
        )
        space = model.context - self._samplings[aspect].max_tokens - fixed_tokens - margin
        if space < 128:
            raise ConfigError(
                f"model {model.name!r} has a context of {model.context:,} tokens; rubric, solution and template take "
                f"about {fixed_tokens:,} and the answer up to {self._samplings[aspect].max_tokens:,}, which leaves no "
                "room for a submission: use a model with a larger context, or a shorter solution or template"
            )
        return space


def _grade(rubric: Rubric, item: Item, result_of: Callable[[str], JobResult | None], hidden: PrivateTexts) -> Grade:
    answers: dict[Aspect, ParsedAnswer | str] = {}
    for aspect in dict.fromkeys(task.aspect for task in item.tasks):
        task_results = [(task, result_of(task.job_id)) for task in item.tasks if task.aspect == aspect]
        (task, result), *_ = task_results
        asks = bool(task.question_keys)
        answers[aspect] = _answers(rubric, item, task_results) if asks else _answer(rubric, item, task, result)
    name = item.submission.name
    grade = grade_submission(name, rubric, answers, item.submission, item.cuts, item.findings, hidden, item.copy_reason)
    return replace(grade, item_id=item.item_id)


def _answer(rubric: Rubric, item: Item, task: Task, result: JobResult | None) -> ParsedAnswer | str:
    """The parsed answer, or one sentence that says why there is none."""
    if result is None:
        return NO_RESULT_YET
    if result.state != "succeeded":
        return f"{result.state}: {result.error.message}" if result.error else result.state
    texts = [_without_fence(item, text) for text in (result.text, *result.more_texts)]
    try:
        return parse_samples(texts, rubric.for_model(task.aspect), with_summary=task.aspect == "feedback")
    except AnswerError as error:
        return f"the answer of {result.model} can't be used: {error}"


def _answers(rubric: Rubric, item: Item, task_results: Sequence[tuple[Task, JobResult | None]]) -> ParsedAnswer | str:
    """What the jobs that ask an aspect's questions have answered together."""
    criteria: dict[str, CriterionAnswer] = {}
    problems: dict[str, str] = {}
    summary, passage = "", None
    for task, result in task_results:
        if result is None:
            return NO_RESULT_YET
        for name, answers in _answers_by_name(item, task, result):
            try:
                if isinstance(answers, str):
                    problems[name] = answers
                elif name == SUMMARY:
                    summary = parse_summary(answers[0].text)
                elif name == PASSAGE:
                    passage = parse_passage(answers[0].text, answers[0].likelihoods)
                else:
                    criterion = next(criterion for criterion in rubric.criteria if criterion.id == name)
                    criteria[name] = parse_criterion_samples(answers, criterion)
            except AnswerError as error:
                problems[name] = f"the answer of {result.model} can't be used: {error}"
    return ParsedAnswer(criteria, summary, problems, problems.pop(SUMMARY, ""), passage)


def _answers_by_name(item: Item, task: Task, result: JobResult) -> Iterator[tuple[str, list[QuestionAnswer] | str]]:
    """For each question that is still asked, its answers, or one sentence that says why there is none."""
    failure = f"{result.state}: {result.error.message}" if result.error else result.state
    for name, question, answers in task.question_answers(result):
        if question:
            unfenced_answers = [replace(answer, text=_without_fence(item, answer.text)) for answer in answers]
            yield name, unfenced_answers if result.state == "succeeded" and unfenced_answers else failure


def _without_fence(item: Item, text: str) -> str:
    """The code around a student's text is nobody's business: an answer that repeats it is read without it."""
    return text.replace(item.fence, "…") if item.fence else text

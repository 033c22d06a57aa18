"""Makes grades from answers: each submission's grade and the class's, combined with the grades that exist already."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from grading.alarms import class_alarms
from grading.jobs import Assignment, Item, Task
from grading.own_work import given_with_rubric
from grading.points import (
    EARLIER_REMARK,
    KEPT_REMARK,
    NAMED_REMARK,
    NO_RESULT_YET,
    NOT_SENT_YET,
    Grade,
    grade_by_hand,
    grade_submission,
)
from grading.prompts.answers import (
    AnswerError,
    CriterionGrade,
    ParsedAnswer,
    criterion_grade,
    parse_criterion_samples,
    parse_passage,
    parse_samples,
    parse_summary,
)
from grading.prompts.prompt import RULES, versions
from grading.prompts.questions import PASSAGE, SUMMARY
from grading.quotes import PrivateTexts, private_texts
from grading.report.grades import GradedClass
from grading.request import WHOLE_CLASS
from grading.roster import UNASSIGNED_QUESTION
from grading.rubric.rubric import Aspect, Rubric
from grading.submissions.lms_names import same_student
from messages.jobs import JobResult, QuestionAnswer

# The beginning of a remark that asks who handed in the submission.
_WHOSE = "whose is it?"


def open_questions(grade: Grade) -> list[str]:
    """Return the remarks on whose a submission is. A person must settle these before its points are given out."""
    return [remark for remark in grade.remarks if remark.startswith(_WHOSE)]


def make_grades(
    assignment: Assignment,
    result_of: Callable[[str], JobResult | None],
    planned_ids: Container[str] | None = None,
    previous_class: GradedClass | None = None,
) -> list[Grade]:
    """Make the grade of each submission from the results that its jobs have so far.

    Args:
        planned_ids: ids of the batch's jobs; None: all jobs are in the batch.
        previous_class: the grades last written. A submission keeps its old grade if the jobs that would be made for it
            now are not in the plan, even if it has another name now. One that was not sent has no grade to keep.
    """
    hidden = _hidden_texts(assignment)
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
            and not all(task.job.job_id in planned_ids for task in item.tasks)
            and old.reason != UNASSIGNED_QUESTION
        ):
            was_unknown = NAMED_REMARK in old.remarks or old.person != item.owner.display_name
            old = replace(
                old,
                submission=name,
                person=item.owner.display_name,
                remarks=tuple(text for text in old.remarks if item.owner.question or not text.startswith(_WHOSE)),
            )
            unchanged_remark = NAMED_REMARK if was_unknown else KEPT_REMARK
            new_grades.append(_as_before(old, previous_class.versions, now, unchanged_remark))
        else:
            grade = (
                grade_by_hand(item.submission, assignment.rubric, assignment.examples)
                if assignment.examples and name in assignment.examples.points
                else _grade(assignment.rubric, item, result_of, hidden)
            )
            was_held_back = old is not None and old.reason == UNASSIGNED_QUESTION and grade.has_nothing_yet
            new_grades.append(
                replace(
                    grade,
                    item_id=item.item_id,
                    person=item.owner.display_name,
                    versions=now,
                    reason=NOT_SENT_YET if was_held_back else grade.reason,
                )
            )
    return new_grades


def _as_before(old: Grade, of_class: Mapping[str, str], now: Mapping[str, str], unchanged_remark: str) -> Grade:
    """Keep an old grade and add the remark that says why.

    `unchanged_remark` is used if its versions are the current ones.
    """
    # Earlier releases recorded versions only for a class, not for each grade. If a grade has no versions, those of its
    # class are used, unless a remark says that it was made with another rubric, solution or template.
    versions = old.versions or ({} if EARLIER_REMARK in old.remarks else of_class)
    remark = unchanged_remark if versions == now else EARLIER_REMARK
    other_remarks = [text for text in old.remarks if text not in (KEPT_REMARK, NAMED_REMARK, EARLIER_REMARK)]
    return replace(old, remarks=(*other_remarks, *([remark] if remark else [])), versions=versions)


def with_removed_submissions(
    assignment: Assignment, new_grades: Sequence[Grade], previous_class: GradedClass | None
) -> list[Grade]:
    """Add the grades of submissions that are no longer in the folder.

    Grading a part of the class, or only looking at it, must not lose these grades. A submission without any result was
    never graded, and is left out.
    """
    if not previous_class or assignment.request.selection == WHOLE_CLASS:
        return list(new_grades)
    present_students, now = {same_student(grade.submission) for grade in new_grades}, dict(_versions(assignment))
    removed_grades = [
        _as_before(grade, previous_class.versions, now, KEPT_REMARK if KEPT_REMARK in grade.remarks else "")
        for grade in previous_class.grades
        if same_student(grade.submission) not in present_students and not grade.has_nothing_yet
    ]
    return sorted([*new_grades, *removed_grades], key=lambda grade: grade.submission)


def _hidden_texts(assignment: Assignment) -> PrivateTexts:
    """Return the texts that no feedback may repeat, and the texts that students know anyway."""
    rubric, solution = assignment.rubric, assignment.solution
    notes = [criterion.guidance for criterion in rubric.criteria]
    shown_works = assignment.examples.works if assignment.examples else ()
    secrets = [
        RULES,
        *notes,
        *(part.text for work in shown_works for part in work.parts),
        *(part.text for part in (solution.parts if solution else ())),
    ]
    outputs = [
        part.text for part in (assignment.template.parts if assignment.template else ()) if part.kind == "output"
    ]
    return private_texts(secrets, [*given_with_rubric(rubric, assignment.given_passages), *outputs], notes)


def make_graded_class(
    batch_id: str, assignment: Assignment, new_grades: Sequence[Grade], previous_class: GradedClass | None = None
) -> GradedClass:
    """Make the record of the class's grades for the batch's folder. `previous_class`: see `make_grades`."""
    rubric = assignment.rubric
    by_models = [grade for grade in new_grades if grade.state not in ("empty", "link only") and not grade.is_unreadable]
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
    return versions(assignment.rubric, assignment.solution, assignment.template, assignment.examples)


def _grade(rubric: Rubric, item: Item, result_of: Callable[[str], JobResult | None], hidden: PrivateTexts) -> Grade:
    answers: dict[Aspect, ParsedAnswer | str] = {}
    for aspect in dict.fromkeys(task.aspect for task in item.tasks):
        task_results = [(task, result_of(task.job.job_id)) for task in item.tasks if task.aspect == aspect]
        (task, result), *_ = task_results
        answers[aspect] = (
            _answers(rubric, item, task_results) if task.questions_by_key else _answer(rubric, item, task, result)
        )
    name = item.submission.name
    grade = grade_submission(name, rubric, answers, item.submission, item.cuts, item.findings, hidden, item.copy_reason)
    question = "" if grade.reason == item.owner.question else item.owner.question
    return replace(grade, remarks=(*([f"{_WHOSE} {question}"] if question else []), *grade.remarks))


def _answer(rubric: Rubric, item: Item, task: Task, result: JobResult | None) -> ParsedAnswer | str:
    """Return the parsed answer, or a sentence that says why there is none."""
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
    """Combine the answers of all jobs that ask one aspect's questions."""
    by_id = {criterion.id: criterion for criterion in rubric.criteria}
    criteria: dict[str, CriterionGrade] = {}
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
                    criteria[name] = parse_criterion_samples(answers, by_id[name])
            except AnswerError as error:
                problems[name] = f"the answer of {result.model} can't be used: {error}"
    failed_criteria = {
        name: criterion_grade(by_id[name], None, reason=problems[name]) for name in problems if name in by_id
    }
    return ParsedAnswer(failed_criteria | criteria, summary, problems.get(SUMMARY, ""), passage)


def _answers_by_name(item: Item, task: Task, result: JobResult) -> Iterator[tuple[str, list[QuestionAnswer] | str]]:
    """Yield the answers to each question that is still asked, or a sentence that says why there are none."""
    failure = f"{result.state}: {result.error.message}" if result.error else result.state
    for name, question, answers in task.question_answers(result):
        if question:
            unfenced_answers = [replace(answer, text=_without_fence(item, answer.text)) for answer in answers]
            yield name, unfenced_answers if result.state == "succeeded" and unfenced_answers else failure


def _without_fence(item: Item, text: str) -> str:
    """Replace the fence in an answer: the code around a student's text must not become known."""
    return text.replace(item.fence, "…") if item.fence else text

"""Turns a request into a batch's plan: reads the class, builds the prompts, and writes down the jobs."""

import json
import os
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from grading.inputs import keep_inputs, read_examples, read_inputs
from grading.jobs import Assignment, EarlierJobs, Item, PromptMaker
from grading.names.pseudonyms import pseudonym, pseudonymise
from grading.own_work import common_lines, given_to_class, mark_given, with_equal_files_noted
from grading.prompts.prompt import ExampleSet, work_digest
from grading.report.grades import GradedClass
from grading.request import GradeRequest
from grading.roster import UNASSIGNED_QUESTION, keep_roster
from grading.rubric.rubric import Rubric
from grading.submissions.lms_names import same_student, student_id
from grading.submissions.reading import Submission
from messages.change import replace_fields
from producers.batch.batch import Batch, BatchEntry
from producers.batch.forms import QUESTION_FORM
from producers.batch.intake import failed_intake


def prepare(
    request: GradeRequest,
    batch_id: str,
    secret: bytes,
    older_form: int | None = None,
    planned_entries: Sequence[BatchEntry] = (),
    succeeded_ids: Container[str] = (),
) -> Assignment:
    """Read everything and build every prompt. A rerun of the same batch gives the same job ids.

    Prompts of an older form (`older_form`; None: the current form) can't be rebuilt byte for byte, so the jobs of such
    a batch are the `planned_entries`. Questions that a planned job asks, or that one of `succeeded_ids` has answered,
    are not asked again.

    Raises RubricError, SubmissionError (folder, solution or template unusable), ConfigError.
    """
    documents, input_data, changed_files = read_inputs(request)
    selection, all_submissions = request.selection, request.read()
    roster, all_names = request.read_roster(), [submission.name for submission in all_submissions]
    owners = roster.owners(all_names)
    sent_names = {entry.name for entry in planned_entries if entry.role != "intake"}
    unassigned_names = {name for name, owner in owners.items() if owner.question == UNASSIGNED_QUESTION} - sent_names
    selected_names = set(all_names if selection.is_whole else request.selected_names(selection))
    form = older_form or QUESTION_FORM
    excluded_names = unassigned_names | request.sampled_names
    examples = read_examples(request, documents["rubric"], all_submissions, excluded_names, secret)
    if examples:
        input_data["examples"] = json.dumps(asdict(examples)).encode()
        classmates = [submission for submission in all_submissions if submission.name not in examples.points]
        safe_works = pseudonymise([*classmates, *examples.works], secret, form, roster)[len(classmates) :]
        examples = replace(examples, works=tuple(safe_works))
    # The search for names covers all submissions, even those that this run does not grade, because a submission can
    # contain the name of a classmate.
    submissions = [
        replace(submission, parts=(), problem=submission.problem or UNASSIGNED_QUESTION)
        if submission.name in unassigned_names
        else submission
        for submission in pseudonymise(all_submissions, secret, form, roster)
        if submission.name in selected_names or selection.leaves_alone(submission.name)
    ]
    assignment = assign(
        request,
        documents["rubric"],
        documents.get("solution"),
        documents.get("template"),
        submissions,
        batch_id,
        secret,
        planned_entries,
        succeeded_ids,
        form,
        examples,
    )
    assignment = _as_planned(assignment, planned_entries) if older_form else assignment
    return replace(
        assignment,
        selected_ids=frozenset(pseudonym(name, secret) for name in selected_names),
        input_data=input_data,
        changed_files=tuple(changed_files),
        work_digests={submission.name: work_digest(submission) for submission in all_submissions},
    )


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
    examples: ExampleSet | None = None,
) -> Assignment:
    """Build the prompts of submissions that have been read.

    Only the models, samples and ask form of `request` are used.

    `form` is the form of the questions, if there are any.
    """
    submissions = list(submissions)
    given_passages = given_to_class(template, submissions)
    work = with_equal_files_noted([mark_given(submission, rubric, given_passages) for submission in submissions])
    assignment = Assignment(request, rubric, (), solution, template, given_passages, examples=examples)
    maker = PromptMaker(
        assignment, batch_id, secret, common_lines(work), EarlierJobs(planned_entries, succeeded_ids), form
    )
    owners = request.read_roster().owners(submission.name for submission in work)
    items = tuple(replace(maker.item(submission), owner=owners[submission.name]) for submission in work)
    return replace(assignment, items=items, selected_ids=frozenset(item.item_id for item in items))


def questions(assignment: Assignment) -> dict[str, str]:
    """Return the open questions about whose each submission is, by the submission's name."""
    return {
        item.submission.name: f"{'not sent: ' * (item.submission.problem == UNASSIGNED_QUESTION)}{item.owner.question}"
        for item in assignment.items
        if item.owner.question
    }


def _as_planned(assignment: Assignment, planned_entries: Iterable[BatchEntry]) -> Assignment:
    """Give the jobs the ids under which they were published. Work handed in later is not part of the batch."""
    ids = {entry.item_id: entry.job_id for entry in planned_entries}
    items = []
    for item in assignment.items:
        tasks = tuple(
            replace(task, job=replace_fields(task.job, job_id=ids[task.job.item_id]))
            for task in item.tasks
            if task.job.item_id in ids
        )
        items += [replace(item, tasks=tasks)] if tasks or not item.tasks else []
    return replace(assignment, items=tuple(items))


def is_same(batch: Batch, assignment: Assignment) -> bool:
    """Whether `assignment` continues `batch`.

    If not, the batch is new, so that another class's grades are not replaced.

    It is the same class if some job is identical, or if all of this holds:

    - the work is where it was, or at the same place relative to the batch's folder (a course folder that was copied);
      or at least half of its names are known, and either the old place is gone or the names are from an LMS, whose
      names are never the same in two assignments
    - the rubric is where it was, or has the same title, or is a version that the batch's folder keeps
    - some name is known, and the titles contain the same numbers: Homework 4 is not Homework 5
    """
    stored_request = batch.request
    if not stored_request:
        return True
    planned_ids = {entry.job_id for entry in batch.entries}
    if any(task.job.job_id in planned_ids for task in assignment.tasks):
        return True
    return "folder" in stored_request and _same_work(batch, assignment) and _same_rubric(batch, assignment)


def _same_work(batch: Batch, assignment: Assignment) -> bool:
    batch_names = {entry.name for entry in batch.entries}
    names = [item.submission.name for item in assignment.items]
    shared_names = [name for name in names if name in batch_names]
    if batch_names and not shared_names:
        return False
    nowhere_else = all(map(student_id, shared_names)) or not Path(str(batch.request["folder"])).exists()
    return _is_there(batch, "folder", assignment.request.folder) or (
        nowhere_else and 2 * len(shared_names) >= len(names)
    )


def _same_rubric(batch: Batch, assignment: Assignment) -> bool:
    rubric, title = assignment.request.rubric, assignment.rubric.title
    if rubric.resolve().is_relative_to(batch.folder.resolve()):
        return True
    stored_title = str(batch.request.get("title", title))
    same_numbers = re.findall(r"\d+", stored_title) == re.findall(r"\d+", title)
    return same_numbers and (_is_there(batch, "rubric", rubric) or batch.request.get("title") == title)


def _is_there(batch: Batch, field: str, path: Path) -> bool:
    """Whether the path is the one that the batch stores, or has the same place relative to the batch's folder."""
    stored_path, place = (str(batch.request.get(name, "")) for name in (field, "out"))
    seen_from = os.path.relpath(stored_path, place) if stored_path and place else ""
    return stored_path == str(path.resolve()) or seen_from == os.path.relpath(path.resolve(), batch.folder.resolve())


def names_so_far(batch: Batch) -> tuple[str, ...] | Literal["all"]:
    """Return who is in the batch's class already, in the form of `Selection.other_names`."""
    stored_request = batch.request
    whole = stored_request and not (stored_request.get("only") or stored_request.get("limit"))
    return "all" if whole else tuple({*stored_request.get("only", ()), *(entry.name for entry in batch.entries)})


def select_unfinished(batch: Batch, assignment: Assignment, previous_class: GradedClass | None) -> Assignment:
    """Select the submissions with a job that has not succeeded, and those about which nothing is known."""
    succeeded_ids = batch.succeeded_ids
    unfinished_ids = {entry.item_id.rpartition(".")[0] for entry in batch.entries if entry.job_id not in succeeded_ids}
    # Compare item ids, not names, because newer work without a grade can have the same name as older work with a grade.
    graded_ids = (
        {grade.item_id for grade in previous_class.grades if not grade.has_nothing_yet} if previous_class else set()
    )
    new = {item.item_id for item in assignment.items if item.item_id not in graded_ids}
    unfinished_ids |= {
        item.item_id for item in assignment.items if any(task.job.job_id not in succeeded_ids for task in item.tasks)
    } & new
    return replace(assignment, selected_ids=frozenset(unfinished_ids))


def plan(batch: Batch, assignment: Assignment) -> None:
    """Write the manifest, and failed results for unreadable submissions, before anything is published.

    The jobs of submissions that are not selected stay as planned.
    """
    selected_items = [item for item in assignment.items if item.item_id in assignment.selected_ids]
    entries = [
        BatchEntry(
            task.job.job_id,
            task.job.item_id,
            task.job.model,
            task.aspect,
            item.submission.name,
            tuple(task.questions_by_key),
        )
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
    keep_roster(batch.folder, assignment.request.read_roster())
    batch.plan(*_with_others(batch, assignment, entries, selected_items))
    if unreadable:
        batch.journal.record(result for _, result in unreadable)


def _with_others(
    batch: Batch, assignment: Assignment, entries: list[BatchEntry], selected_items: Sequence[Item]
) -> tuple[list[BatchEntry], dict[str, object], list[BatchEntry]]:
    """Return the arguments for `Batch.plan`.

    A run for a part of the class keeps the others' jobs, and doesn't wait for them.
    """
    selection = assignment.request.selection
    selected_students = {same_student(item.submission.name) for item in selected_items}
    graded_digests = batch.request.get("submissions", {})
    description = assignment.request.stored_form | {
        "title": assignment.rubric.title,
        "out": str(batch.folder.resolve()),
        "inputs": keep_inputs(batch.folder, assignment.request, assignment.input_data),
        "submissions": {
            name: digest if same_student(name) in selected_students else graded_digests.get(name, digest)
            for name, digest in assignment.work_digests.items()
        },
    }
    other_entries = [entry for entry in batch.entries if same_student(entry.name) not in selected_students]
    if selection.from_manifest:
        return [*(entry for entry in other_entries if batch.result(entry.job_id)), *entries], description, []
    if selection.is_whole:
        return entries, description, []
    names = (
        []
        if selection.other_names == "all"
        else sorted({*selection.other_names, *(item.submission.name for item in selected_items)})
    )
    return entries, description | {"only": names, "limit": 0}, other_entries

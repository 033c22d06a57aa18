"""Whether the batch in a folder is of the class that is to be graded: another class's grades must not be replaced.

It is the same class if some job is the very same, or if all of this holds:

- the work: it is where it was, or where it was as seen from the batch's folder (a course folder that was copied); or at
  least half of its names are known, and the old place is gone or the names are an LMS's, which no two assignments share
- the rubric: it is where it was, has the title that it had, or is a version that the batch's folder keeps
- some name is known, and the titles have the same numbers: Homework 4 is not Homework 5
"""

import os
import re
from pathlib import Path

from grading.jobs import Assignment
from grading.submissions.lms_names import student_id
from producers.batch.batch import Batch


def is_same(batch: Batch, assignment: Assignment) -> bool:
    """Whether `assignment` goes on with `batch`; also where the batch is new."""
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
    """Whether the path is the one that the batch keeps, or would be if both had been copied together."""
    stored_path, place = (str(batch.request.get(name, "")) for name in (field, "out"))
    seen_from = os.path.relpath(stored_path, place) if stored_path and place else ""
    return stored_path == str(path.resolve()) or seen_from == os.path.relpath(path.resolve(), batch.folder.resolve())

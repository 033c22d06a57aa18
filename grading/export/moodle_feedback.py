"""Moodle: the zip of feedback files. They go back in folders named like those of the submissions."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from grading.export import feedback
from grading.export.feedback import FeedbackKind, feedback_text, zip_feedback
from grading.export.final import ExportFile, final_grades, left_blank
from grading.export.format import ExportFormat
from grading.export.moodle import NO_ID, held_by_moodle
from grading.submissions.lms_names import moodle_id

_FILE = "moodle-feedback.zip"


def export_moodle_feedback(
    folder: Path,
    kind: FeedbackKind = "html",
    *,
    include_unreviewed: bool = False,
) -> ExportFile:
    """A zip for "Upload multiple feedback files in a zip". Raises ExportError, BatchError."""
    graded_class, grades = final_grades(folder, include_unreviewed)
    data = zip_feedback(
        (f"{PurePosixPath(final.submission).name}/feedback.{kind}", feedback_text(graded_class.title, final, kind))
        for final in grades
        if final.points is not None and moodle_id(final.submission)
    )
    blank = left_blank(grades, lambda final: "" if moodle_id(final.submission) else NO_ID)
    return ExportFile(_FILE, "application/zip", data, blank, asks=graded_class.alarms)


FORMAT = ExportFormat(
    "moodle-feedback",
    "Moodle feedback files",
    "One feedback file for each student, for Moodle's Upload multiple feedback files in a zip.",
    (_FILE,),
    export_moodle_feedback,
    feedback.FORMAT.options,
    select_grades=lambda folder, grades, _choices, _title: held_by_moodle(folder, grades, None),
    fields=lambda _form, _names: {},
)

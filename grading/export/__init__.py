"""Exports grades: a file for the LMS, a table, or feedback for each student.

`FORMATS` lists all formats. Each takes a batch's folder and returns an `ExportFile`: bytes to save or to offer for
download, and the submissions that were left blank, with the reason. A grade that failed, is incomplete or waits for a
person is left blank, never 0. Only work that was read and found empty gets 0.

The decisions in the folder's reviews.jsonl are applied. A person must confirm the sentences in `ExportFile.asks` before
the file is given out. Raises ExportError (a UsageError).
"""

from grading.export import canvas, feedback, moodle, moodle_feedback, plain, requests
from grading.export.final import ExportFile, FinalGrade, final_grades
from grading.export.format import Choices, ExportFormat, ExportOption, Form
from grading.export.last import SinceLast, record_export, since_last
from grading.export.late import keep_times, late_of
from grading.export.requests import (
    Request,
    add_requests,
    export_replies,
    points_of,
    read_requests,
    requests_from,
    save_reply,
)
from grading.tables import ExportError

# The formats, in the order of `kvasir export --help`.
FORMATS: tuple[ExportFormat, ...] = (
    canvas.FORMAT,
    moodle.FORMAT,
    moodle_feedback.FORMAT,
    plain.FORMAT,
    feedback.FORMAT,
)
# The desk lists the plain table first, because this format needs no file from the LMS.
#
# Only the desk offers the replies to students' requests as a format.
DESK_FORMATS = (*sorted(FORMATS, key=lambda export_format: export_format is not plain.FORMAT), requests.REPLIES)

__all__ = [
    "DESK_FORMATS",
    "FORMATS",
    "Choices",
    "ExportError",
    "ExportFile",
    "ExportFormat",
    "ExportOption",
    "FinalGrade",
    "Form",
    "Request",
    "SinceLast",
    "add_requests",
    "export_replies",
    "final_grades",
    "keep_times",
    "late_of",
    "points_of",
    "read_requests",
    "record_export",
    "requests_from",
    "save_reply",
    "since_last",
]

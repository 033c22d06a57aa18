"""Grades leave the house: a file for the LMS, a table, feedback for each student.

Every function here takes a batch's folder and gives an `ExportFile`: bytes to save or to offer for download, and
the list of submissions that were left blank, with the reason. A grade that failed, is incomplete or waits for a person
is blank, never 0; only what was read and found empty gets 0.

    export_canvas(folder, gradebook, assignment)   Canvas's gradebook, filled in
    export_moodle(folder, worksheet)               Moodle's offline grading worksheet, filled in
    export_moodle_feedback(folder)                 zip that Moodle takes as feedback files
    export_csv(folder)                             one row a submission
    export_feedback(folder, kind)                  zip of one file a student, "md" or "html"
    export_replies(folder)                         students' requests for another look, with the replies

The decisions in the folder's reviews.jsonl count. What `ExportFile.asks` says must have been confirmed before the file
is given out. Raises ExportError (a UsageError).
"""

from grading.export.canvas import assignment_columns, export_canvas, held_by_canvas, matching_columns
from grading.export.feedback import export_feedback
from grading.export.final import ExportFile, FinalGrade, final_grades
from grading.export.last import SinceLast, record_export, since_last
from grading.export.late import keep_times, late_of
from grading.export.moodle import export_moodle, export_moodle_feedback, held_by_moodle
from grading.export.plain import export_csv
from grading.export.requests import (
    Request,
    add_requests,
    export_replies,
    points_of,
    read_requests,
    requests_from,
    save_reply,
)
from grading.export.tables import ExportError

__all__ = [
    "ExportError",
    "ExportFile",
    "FinalGrade",
    "Request",
    "SinceLast",
    "add_requests",
    "assignment_columns",
    "export_canvas",
    "export_csv",
    "export_feedback",
    "export_moodle",
    "export_moodle_feedback",
    "export_replies",
    "final_grades",
    "held_by_canvas",
    "held_by_moodle",
    "keep_times",
    "late_of",
    "matching_columns",
    "points_of",
    "read_requests",
    "record_export",
    "requests_from",
    "save_reply",
    "since_last",
]

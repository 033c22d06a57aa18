"""Makes a zip of feedback files for Moodle. Each file is in a folder named like the submission's folder."""

from pathlib import Path, PurePosixPath

from grading.export import feedback
from grading.export.feedback import FeedbackKind, feedback_text, zip_feedback
from grading.export.final import ExportFile, final_grades, left_blank
from grading.export.format import ExportFormat
from grading.export.moodle import NO_ID
from grading.roster import Owner, kept_files, moodle_name, read_rosters

_FILE = "moodle-feedback.zip"


def export_moodle_feedback(
    folder: Path,
    kind: FeedbackKind = "html",
    *,
    include_unreviewed: bool = False,
) -> ExportFile:
    """Make a zip for Moodle's "Upload multiple feedback files in a zip". Raises ExportError, BatchError."""
    graded_class, grades = final_grades(folder, include_unreviewed)
    roster = read_rosters(kept_files(folder))
    owners = roster.owners(final.submission for final in grades)
    places = {name: _places(name, owner, roster.product) for name, owner in owners.items()}
    files = (
        (f"{place}/feedback.{kind}", feedback_text(graded_class.title, final, kind))
        for final in grades
        if final.points is not None
        for place in places[final.submission]
    )

    return ExportFile(
        _FILE,
        "application/zip",
        zip_feedback(files),
        left_blank(
            grades, lambda final: "" if places[final.submission] else owners[final.submission].question or NO_ID
        ),
        asks=graded_class.alarms,
        held_ids={final.grade.id for final in grades if places[final.submission]},
    )


def _places(name: str, owner: Owner, product: str) -> list[str]:
    """Return the folders for a submission's feedback in the zip.

    This is the folder's original name, or a folder for each person of a team. Moodle finds a participant by the number
    in the folder's name (`assignfeedback_file_zip_importer`), and knows no numbers of teams. The list is empty while it
    is an open question whose the submission is.
    """
    number = owner.claim.number if owner.claim and owner.claim.product == "moodle" else ""
    if owner.question:
        return []
    if number and not owner.group and (not owner.people or number in owner.numbers):
        return [PurePosixPath(name).name]
    people = owner.people if product == "moodle" or number else ()
    return [f"{moodle_name(person.name)}_{person.number}_assignsubmission_file_" for person in people]


FORMAT = ExportFormat(
    "moodle-feedback",
    "Moodle feedback files",
    "One feedback file for each student, for Moodle's Upload multiple feedback files in a zip.",
    (_FILE,),
    export_moodle_feedback,
    feedback.FORMAT.options,
    fields=lambda _form, _names: {},
)

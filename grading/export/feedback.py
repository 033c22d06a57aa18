"""The feedback that a student reads: points, comments and quoted evidence.

It never contains the grading notes, the solution or the prompt.
"""

import html
import io
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal

from grading.export.final import ExportFile, FinalGrade, final_grades, left_blank
from grading.export.format import ExportFormat, ExportOption
from grading.report.grades import one_line, show_points
from grading.roster import Owner, canvas_name, kept_files, read_rosters

FeedbackKind = Literal["md", "html"]

WITHHELD_NOTICE = "(The feedback on this point is withheld; please ask your instructor.)"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_NAME_BYTES = 230  # file systems allow 255 bytes in a name; 25 are reserved for additions
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+!|~=-])")
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:42rem;margin:2rem auto;padding:0 1rem}"
    "blockquote{margin:.5rem 0;padding-left:.8rem;border-left:3px solid #bbb;white-space:pre-wrap}"
)


def export_feedback(
    folder: Path,
    kind: FeedbackKind = "md",
    *,
    include_unreviewed: bool = False,
) -> ExportFile:
    """Make a zip with one file for each student, named after the submission. Raises BatchError.

    Where only a person's answer says whose it is, name and number stand before that name, as in Canvas's files.
    Students without a final grade get no file. Feedback that repeats confidential text is withheld and listed.
    """
    graded_class, grades = final_grades(folder, include_unreviewed)
    owners = read_rosters(kept_files(folder)).owners(final.submission for final in grades)
    used_file_names: set[str] = set()
    files = (
        (
            _file_name(final.submission, owners[final.submission], kind, used_file_names),
            feedback_text(graded_class.title, final, kind),
        )
        for final in grades
        if final.points is not None
    )
    return ExportFile(
        f"feedback-{kind}.zip",
        "application/zip",
        zip_feedback(files),
        left_blank(grades, _withheld_note),
        asks=graded_class.alarms,
    )


def zip_feedback(files: Iterable[tuple[str, str]]) -> bytes:
    """Zip texts under their names. The same texts always give the same bytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files:
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), text, zipfile.ZIP_DEFLATED)
    return data.getvalue()


def _withheld_note(final: FinalGrade) -> str:
    ids = [criterion.id for criterion in final.criteria if criterion.leaks and final.points is not None]
    return f"feedback withheld for {', '.join(ids)}: it repeats what only graders see" if ids else ""


def _file_name(submission: str, owner: Owner, kind: FeedbackKind, used_names: set[str]) -> str:
    """Return a file name that is valid on every system and that no other submission has."""
    claim = [canvas_name(owner.name), *sorted(owner.numbers)] if owner.people and not owner.is_explained else []
    stem = re.sub(r"[^\w.\- ]", "_", "_".join([*claim, PurePosixPath(submission).name])).strip(". ")[:120]
    stem = stem.encode()[:_NAME_BYTES].decode("utf-8", "ignore") or "submission"
    name, number = f"{stem}.{kind}", 1
    while name.casefold() in used_names:
        number += 1
        name = f"{stem}-{number}.{kind}"
    used_names.add(name.casefold())
    return name


def feedback_text(title: str, final: FinalGrade, kind: FeedbackKind) -> str:
    """Return one student's feedback as the text of a file."""
    if kind == "md":
        return (
            "\n\n".join(_MARKDOWN[block].format(_escape_markdown(text)) for block, text in _blocks(title, final)) + "\n"
        )
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = feedback_fragment(title, final)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def feedback_fragment(title: str, final: FinalGrade) -> str:
    """Return one student's feedback as HTML for a text field. If `title` is "", there is no heading."""
    return "\n".join(_HTML[block].format(html.escape(text)) for block, text in _blocks(title, final))


_MARKDOWN = {"title": "# {}", "total": "**{}**", "text": "{}", "heading": "## {}", "quote": "> {}"}
_HTML = {
    "title": "<h1>{}</h1>",
    "total": "<p><strong>{}</strong></p>",
    "text": "<p>{}</p>",
    "heading": "<h2>{}</h2>",
    "quote": "<blockquote>{}</blockquote>",
}


def _blocks(title: str, final: FinalGrade) -> list[tuple[str, str]]:
    """Yield the blocks of the feedback in order, each with its kind."""
    grade, is_empty = final.grade, final.grade.state == "empty"
    blocks = [
        ("title", title),
        ("total", f"{show_points(final.points)} of {show_points(grade.max_points)} points"),
        ("text", one_line(grade.reason) if is_empty and not final.is_reviewed else ""),
        ("text", f"Taken off: {final.penalty.words}" if final.penalty else ""),
        ("text", one_line(final.summary)),
    ]
    # No points are listed if nothing was handed in, or if a person set only a total for work whose criteria have no
    # points.
    has_points = not is_empty and all(criterion.points is not None for criterion in final.criteria)
    for criterion in final.criteria if has_points else ():
        # The evidence appears as a quote only if it was found in the student's own work.
        is_quoted = criterion.evidence_state == "found" and not criterion.leaks
        blocks += [
            ("heading", f"{criterion.title}: {show_points(criterion.points)} of {show_points(criterion.max_points)}"),
            ("text", WITHHELD_NOTICE if criterion.leaks else one_line(criterion.feedback)),
            ("quote", one_line(criterion.evidence) if is_quoted else ""),
        ]
    return [(block, text) for block, text in blocks if text]


def _escape_markdown(text: str) -> str:
    """Escape a text so that Markdown finds no markup and no HTML in it."""
    return html.escape(_MARKUP.sub(r"\\\1", text), quote=False)


FORMAT = ExportFormat(
    "feedback",
    "One feedback file for each student",
    "Points, feedback and evidence, one file for each student.",
    ("feedback-md.zip", "feedback-html.zip"),
    export_feedback,
    (ExportOption("--as", "choice", "feedback: write Markdown or HTML.", "kind", choices=("md", "html")),),
    fields=lambda form, _names: {"kind": form.one_of("Files", ("html", "md"))},
)

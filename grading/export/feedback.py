"""What a student reads: points, feedback and the quoted evidence. Never the grading notes, solution or prompt."""

from __future__ import annotations

import html
import io
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import Literal

from grading.export.final import ExportFile, FinalGrade, final_grades, left_blank
from grading.export.format import ExportFormat, ExportOption
from grading.points import CriterionGrade
from grading.report.grades import one_line, show_points

FeedbackKind = Literal["md", "html"]

WITHHELD_NOTICE = "(The feedback on this point is withheld; please ask your instructor.)"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same grades make the same bytes
_NAME_BYTES = 230  # file systems take names of 255
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
    """A zip with one file a student, named after the submission. Raises BatchError.

    Who has no final grade has no file. Feedback that repeats what no student may see is withheld and listed.
    """
    graded_class, grades = final_grades(folder, include_unreviewed)
    data = io.BytesIO()
    used_file_names: set[str] = set()
    with zipfile.ZipFile(data, "w") as archive:
        for final in grades:
            if final.points is not None:
                place = zipfile.ZipInfo(_file_name(final.submission, kind, used_file_names), EPOCH)
                archive.writestr(place, feedback_text(graded_class.title, final, kind), zipfile.ZIP_DEFLATED)
    blank = left_blank(grades, _withheld_note)
    return ExportFile(f"feedback-{kind}.zip", "application/zip", data.getvalue(), blank, asks=graded_class.alarms)


def _withheld_note(final: FinalGrade) -> str:
    ids = [criterion.id for criterion in final.criteria if criterion.leaks and final.points is not None]
    return f"feedback withheld for {', '.join(ids)}: it repeats what only graders see" if ids else ""


def _file_name(submission: str, kind: FeedbackKind, used_names: set[str]) -> str:
    """One that unpacks anywhere, and that no other submission has."""
    stem = re.sub(r"[^\w.\- ]", "_", PurePosixPath(submission).name).strip(". ")[:120]
    stem = stem.encode()[:_NAME_BYTES].decode("utf-8", "ignore") or "submission"
    name, number = f"{stem}.{kind}", 1
    while name.casefold() in used_names:
        number += 1
        name = f"{stem}-{number}.{kind}"
    used_names.add(name.casefold())
    return name


def feedback_text(title: str, final: FinalGrade, kind: FeedbackKind) -> str:
    """One student's feedback as a file."""
    return _html(title, final) if kind == "html" else _markdown(title, final)


def _total(final: FinalGrade) -> str:
    return f"{show_points(final.points)} of {show_points(final.grade.max_points)} points"


def _of(criterion: CriterionGrade) -> str:
    return f"{show_points(criterion.points)} of {show_points(criterion.max_points)}"


def _feedback_line(criterion: CriterionGrade) -> str:
    return WITHHELD_NOTICE if criterion.leaks else one_line(criterion.feedback)


def _evidence(criterion: CriterionGrade) -> str:
    """The student's own words, if they are."""
    return one_line(criterion.evidence) if criterion.evidence_state == "found" and not criterion.leaks else ""


def _shown_criteria(final: FinalGrade) -> list[CriterionGrade]:
    """None where a person set the total of what has no criteria points, or nothing was handed in."""
    has_points = final.grade.state != "empty" and all(criterion.points is not None for criterion in final.criteria)
    return list(final.criteria) if has_points else []


def _reason(final: FinalGrade) -> str:
    return one_line(final.grade.reason) if final.grade.state == "empty" and not final.is_reviewed else ""


def _late(final: FinalGrade) -> str:
    return f"Taken off: {final.penalty.words}" if final.penalty else ""


def _markdown(title: str, final: FinalGrade) -> str:
    lines = [f"# {_escape_markdown(title)}", "", f"**{_total(final)}**", ""]
    for paragraph in (_reason(final), _late(final), one_line(final.summary)):
        lines += [_escape_markdown(paragraph), ""] if paragraph else []
    for criterion in _shown_criteria(final):
        lines += [f"## {_escape_markdown(criterion.title)}: {_of(criterion)}", ""]
        lines += [_escape_markdown(_feedback_line(criterion)), ""] if _feedback_line(criterion) else []
        lines += [f"> {_escape_markdown(_evidence(criterion))}", ""] if _evidence(criterion) else []
    return "\n".join(lines).rstrip() + "\n"


def _escape_markdown(text: str) -> str:
    """Text in which Markdown finds no markup and no HTML."""
    return html.escape(_MARKUP.sub(r"\\\1", text), quote=False)


def feedback_fragment(title: str, final: FinalGrade) -> str:
    """The same as a piece of HTML, for a field that takes it; `title` "" leaves the heading out."""
    body = [f"<h1>{html.escape(title)}</h1>"] if title else []
    body.append(f"<p><strong>{_total(final)}</strong></p>")
    body += [f"<p>{html.escape(text)}</p>" for text in (_reason(final), _late(final), one_line(final.summary)) if text]
    for criterion in _shown_criteria(final):
        body.append(f"<h2>{html.escape(criterion.title)}: {_of(criterion)}</h2>")
        body += [f"<p>{html.escape(_feedback_line(criterion))}</p>"] if _feedback_line(criterion) else []
        body += [f"<blockquote>{html.escape(_evidence(criterion))}</blockquote>"] if _evidence(criterion) else []
    return "\n".join(body)


def _html(title: str, final: FinalGrade) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = feedback_fragment(title, final)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


FORMAT = ExportFormat(
    "feedback",
    "One feedback file for each student",
    "Points, feedback and evidence, one file for each student.",
    ("feedback-md.zip", "feedback-html.zip"),
    export_feedback,
    (ExportOption("--as", "choice", "feedback: Markdown or HTML.", "kind", choices=("md", "html")),),
    fields=lambda form, _names: {"kind": form.one_of("Files", ("html", "md"))},
)

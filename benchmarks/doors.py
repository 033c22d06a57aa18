"""Random classes as Canvas and Moodle hand them out, graded and exported: whose row does a grade end in?

    classes           how many were tried: of 3 to 8 people, and some of 120
    wrong_cells       cells of the file for the LMS that hold another grade than the person's own, or one that must be
                      blank
    leaked_names      names of people of the class that stood in a prompt
    dropped_files     files whose part of the work reached no prompt, though nobody was asked to review it
    blank_members     people who handed in, alone or with a team, and got no grade, in classes that leave nothing open
    completed         of the unambiguous classes, the share that was graded and exported without a question
    refused_wrongly   unambiguous classes that were not graded or exported at all

The classes are made by `benchmarks.doors_classes`, from the LMSs' own sources. In place of a model stands a reader who
gives the points that the work says; so a wrong cell is the door's doing, and no model's. `--explain` prints what was
wrong with the first classes, `--first` and `--number` choose which are made. With `--quick`: 300 classes.
"""

import csv
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import harness
from benchmarks.doors_classes import TOTAL, MadeClass, make_class
from grading.export.canvas import export_canvas
from grading.export.moodle import export_moodle
from grading.jobs import Assignment, Task
from grading.planning import plan, prepare
from grading.request import AspectModel, GradeRequest
from kvasir.class_run import report
from messages.errors import UsageError
from messages.jobs import JobResult
from producers.batch.batch import Batch

CLASSES, QUICK_CLASSES = 10_000, 300
FULL_SIZE, QUICK_FULL_SIZE = 100, 2  # classes of 120
RUBRIC = f"""
title: Homework 5
criteria:
  - {{id: parts, title: Parts, points: {TOTAL}, model: code, guidance: Add up the points of all parts.}}
"""
_PART = re.compile(r"part ([a-h]) = (\d+)")
_MODELS = {"code": AspectModel("reader", 32_768)}


@dataclass(slots=True)
class Finding:
    """What came of one class."""

    seed: int
    traits: list[str]
    is_ambiguous: bool
    wrong_cells: list[str] = field(default_factory=list)
    leaked_names: list[str] = field(default_factory=list)
    dropped_files: list[str] = field(default_factory=list)
    blank_members: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    refusal: str = ""


def try_class(seed: int, size: int | None = None) -> Finding:
    """Grade and export one class."""
    made = make_class(seed, size)
    finding = Finding(seed, sorted(made.traits), bool(made.ambiguous) or made.is_ambiguous)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "rubric.yaml").write_text(RUBRIC)
        (folder / "submissions.zip").write_bytes(made.zipped())
        (folder / "roster.csv").write_bytes(made.roster)
        (folder / "groups.csv").write_bytes(made.groups)
        (folder / "participants.csv").write_bytes(made.participants)
        try:
            _grade_and_export(folder, made, finding)
        except UsageError as error:
            finding.refusal = str(error)
    return finding


def _grade_and_export(folder: Path, made: MadeClass, finding: Finding) -> None:
    files = ("roster.csv", "groups.csv", "participants.csv")
    rosters = tuple(path for name in files if (path := folder / name).stat().st_size)
    request = GradeRequest(folder / "submissions.zip", folder / "rubric.yaml", _MODELS, rosters=rosters)
    with Batch(folder / "batch") as batch:
        assignment = prepare(request, batch.batch_id, batch.secret)
        plan(batch, assignment)
        batch.journal.record(_result(batch.batch_id, task) for task in assignment.tasks)
        grades = report(batch, assignment, called_engines=True).whole
    _look_at_prompts(made, assignment, finding, any(grade.needs_review for grade in grades))
    if made.product == "canvas":
        exported = export_canvas(folder / "batch", made.roster, "5502", include_unreviewed=True)
    else:
        exported = export_moodle(folder / "batch", made.roster, include_unreviewed=True)
    # That only a link was handed in is said, and asks nothing: there is nothing to grade.
    left_blank = [blank for blank in exported.left_blank if not blank.reason.startswith("link only")]
    finding.questions += [*exported.asks, *(f"{blank.submission}: {blank.reason}" for blank in left_blank)]
    _look_at_cells(made, dict(_cells(made, exported.data)), finding)


def _result(batch_id: str, task: Task) -> JobResult:
    """What a reader answers who adds up what the work says."""
    found = _PART.findall(task.job.prompt[-1].text)
    points = sum(int(number) for _, number in found)
    quote = f"part {found[0][0]} = {found[0][1]}" if found else ""
    answer = {"parts": {"evidence": quote, "points": points, "feedback": "The parts were added up."}}
    text = json.dumps(answer)
    return JobResult(task.job.job_id, 1, batch_id, task.job.item_id, task.job.model, "succeeded", text=text)


def _look_at_prompts(made: MadeClass, assignment: Assignment, finding: Finding, is_reviewed: bool) -> None:
    prompts = "\n".join(task.job.prompt[-1].text for task in assignment.tasks)
    folded = prompts.casefold()
    finding.leaked_names = [name for name in sorted(made.names) if name.casefold() in folded]
    for path, data in made.files.items():
        mark = re.search(r"sample is (\d+\.\d+)", data.decode("utf-8", "replace"))  # in no other file
        if mark and not is_reviewed and mark[1] not in prompts:
            finding.dropped_files.append(path)


def _cells(made: MadeClass, data: bytes) -> Iterator[tuple[int, str]]:
    """Person's number and the grade's cell, as the LMS finds them.

    Canvas: `GradebookImporter#csv_stream`, `process_student`. Moodle: `assignfeedback_offline_grade_importer::next`.
    """
    text = data.decode("utf-8-sig")
    first = text.partition("\n")[0]
    rows = list(csv.reader(io.StringIO(text), delimiter=";" if first.count(";") > first.count(",") else ","))
    header = rows[0]
    if made.product == "canvas":
        id_column = header.index("ID")
        grade = next(index for index, title in enumerate(header) if title.endswith("(5502)"))
    else:
        id_column, grade = header.index("Identifier"), header.index("Grade")
    for row in rows[1:]:
        number = re.sub(r"\D*(\d+)\s*\Z", r"\1", row[id_column]) if made.product == "moodle" else row[id_column]
        if re.fullmatch(r"\d+(?:\.\d*)?(?:[eE][+]?\d+)?", number):
            yield int(float(number)), row[grade].strip()


def _look_at_cells(made: MadeClass, cells: dict[int, str], finding: Finding) -> None:
    for person in made.people:
        cell = cells.get(person.number, "")
        right = made.points.get(person.number, made.ambiguous.get(person.number))
        grade = float(cell.replace(",", ".")) if cell else None
        if grade is not None and grade != right:
            finding.wrong_cells.append(f"{person.number} has {cell}, not {right}")
        elif grade is None and person.number in made.points:
            finding.blank_members.append(f"{person.number} is blank, not {right}")


def main() -> int:
    """Try them all, and end with the line of JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first class")
    parser.add_argument("--number", type=int, default=0, help="how many small classes (default: 10,000, or 300)")
    parser.add_argument("--explain", type=int, default=0, help="print what was wrong with so many classes")
    options = parser.parse_args()
    count = options.number or (QUICK_CLASSES if options.quick else CLASSES)
    base = 1_000_000 * options.seed + options.first
    with ProcessPoolExecutor() as pool:
        findings = list(pool.map(try_class, range(base, base + count), chunksize=20))
        large = range(QUICK_FULL_SIZE if options.quick else FULL_SIZE)
        findings += pool.map(partial(try_class, size=120), (base - 1 - number for number in large))
    unambiguous = [finding for finding in findings if not finding.is_ambiguous]
    kinds: Counter[str] = Counter()
    for finding in findings:
        if _is_wrong(finding):
            kinds.update(finding.traits)
            if options.explain > 0:
                options.explain -= 1
                print(finding)
    print("traits of classes with something wrong:", dict(kinds.most_common()))
    harness.finish(
        classes=len(findings),
        wrong_cells=sum(len(finding.wrong_cells) for finding in findings),
        leaked_names=sum(len(finding.leaked_names) for finding in findings),
        dropped_files=sum(len(finding.dropped_files) for finding in findings),
        blank_members=sum(len(finding.blank_members) for finding in findings),
        completed=sum(not (finding.refusal or finding.questions) for finding in unambiguous) / len(unambiguous),
        refused_wrongly=sum(bool(finding.refusal) for finding in unambiguous),
    )
    return 0


def _is_wrong(finding: Finding) -> bool:
    lists = (finding.wrong_cells, finding.leaked_names, finding.dropped_files, finding.blank_members)
    return any(lists) or (not finding.is_ambiguous and bool(finding.refusal or finding.questions))


if __name__ == "__main__":
    sys.exit(main())

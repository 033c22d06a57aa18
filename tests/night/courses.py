"""The courses of a night: what their instructors have in their hands in the evening, and the truth beside it."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.doors_classes import MadeClass, make_class
from tests.night.reader import MOST
from tests.support.homework import EXAMPLE
from tests.support.processes import ROOT

WRITER, READER, EXAMPLE_MODEL = "writer:8b", "reader:1b", "kvasir-demo"
SMOLLM2, GEMMA = "smollm2:135m", "gemma3:270m"  # real ones
ASSIGNMENT = "5502"  # of benchmarks.doors_classes: the column of the gradebook
DATASET = Path(os.environ.get("DIGIKLAUSUR", ROOT.parent / "shared/datasets/digiklausur"))
_GRADED_BY_HAND = 3  # exams
_TRIES = 5_000  # seeds that are looked at for a class of the wanted kind

GUIDANCE = "Names and remarks count."
CORRECTED_GUIDANCE = "Names count and remarks do so where they are needed."

# Of the total the whole points are the reader's: the other criterion gives a half, or nothing.
HOMEWORK = f"""\
title: Homework 5
criteria:
  - {{id: parts, title: Parts, points: 19.5, step: 0.5, model: code, guidance: Add up the points of all parts.}}
  - {{id: clear, title: Clarity, points: 0.5, step: 0.5, model: feedback, guidance: {GUIDANCE}}}
"""
EXAM = """\
title: Neural networks
criteria:
  - {id: learning, title: Learning, points: 2, model: code, guidance: Two points where both halves are right.}
  - {id: networks, title: Networks, points: 2, model: code, guidance: One point for each of two reasons.}
  - {id: words, title: Words, points: 2, model: feedback, guidance: Terms are used as in the lecture.}
"""


@dataclass(slots=True)
class Course:
    """One class's evening: its files, where its batch lies, and who is in it."""

    title: str
    work: Path
    rubric: Path
    out: Path
    rosters: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()
    truth: MadeClass | None = None  # None: nobody's roster
    names: frozenset[str] = field(default_factory=frozenset)  # that leave this machine in nothing

    def words(self, *more_options: str) -> list[str]:
        """Arguments of `grade` and `submit`."""
        rosters = [word for roster in self.rosters for word in ("--roster", str(roster))]
        words = [str(self.work), "--rubric", str(self.rubric), *rosters, "--out", str(self.out), *self.options]
        return [*words, *more_options]


def made_course(folder: Path, kind: str, seed: int, size: int) -> Course:
    """A class as an LMS hands it out, of a `kind` that benchmarks.doors_classes has as a trait, where nothing is open.

    `kind`: "canvas named", "canvas groups", "moodle teams" and the like.
    """
    product = kind.partition(" ")[0]
    for number in range(seed * _TRIES, (seed + 1) * _TRIES):
        truth = make_class(number, size)
        is_settled = not truth.is_ambiguous and not truth.ambiguous and max(truth.points.values()) < MOST
        if kind in truth.traits and is_settled:
            break
    else:
        raise AssertionError(f"no class of the kind {kind!r} among {_TRIES} seeds")
    folder.mkdir(parents=True)
    files = {"submissions.zip": truth.zipped(), "rubric.yaml": HOMEWORK.encode()}
    rosters = {"roster.csv": truth.roster, "groups.csv": truth.groups, "participants.csv": truth.participants}
    for name, data in {**files, **rosters}.items():
        if data:
            (folder / name).write_bytes(data)
    # The folder of the batch is named as people name theirs: not even that may travel.
    out = folder / f"{truth.people[0].given}s {product}"
    return Course(
        kind,
        folder / "submissions.zip",
        folder / "rubric.yaml",
        out,
        tuple(folder / name for name, data in rosters.items() if data),
        ("--ask", "criteria"),
        truth,
        frozenset(truth.names | {out.name}),
    )


def exam_course(folder: Path, size: int, *options: str, title: str = "exam", has_examples: bool = False) -> Course:
    """`size` exams of the real ones, where they are there; else as many, made on the spot.

    `has_examples`: of the first ones grades by hand are there, from which the models get their examples.
    """
    work = folder / "submissions"
    work.mkdir(parents=True)
    (folder / "rubric.yaml").write_text(EXAM, "utf-8")
    exams = sorted((DATASET / "notebooks").glob("*.ipynb"))[:size]
    for exam in exams:
        shutil.copy(exam, work)
    for number in range(0 if exams else size):
        text = f"# Question 1\nA network of {number} layers learns by its gradient.\n\n# Question 2\nIt generalises.\n"
        (work / f"candidate-{700 + number}.md").write_text(text * 8, "utf-8")
    stems = frozenset(path.stem for path in work.iterdir())
    if has_examples:
        names = sorted(path.name for path in work.iterdir())[:_GRADED_BY_HAND]
        rows = [f"{name},{criterion},1,Ada\n" for name in names for criterion in ("learning", "networks", "words")]
        (folder / "hand.csv").write_text("submission,criterion,points,rater\n" + "".join(rows), "utf-8")
        options += ("--examples", str(folder / "hand.csv"))
    return Course(title, work, folder / "rubric.yaml", folder / "batch", options=options, names=stems)


def example_course(folder: Path, size: int) -> Course:
    """The first of the example class, for the example's own model."""
    rubric, solution, template = (EXAMPLE / name for name in ("rubric.yaml", "solution.ipynb", "template.ipynb"))
    models = ("--code-model", EXAMPLE_MODEL, "--feedback-model", EXAMPLE_MODEL)
    options = ("--solution", str(solution), "--template", str(template), "--limit", str(size), *models)
    stems = frozenset(path.stem for path in (EXAMPLE / "submissions").iterdir())
    return Course("example", EXAMPLE / "submissions", rubric, folder / "batch", options=options, names=stems)


def all_names(courses: Sequence[Course]) -> list[str]:
    """What no queue, store or log may hold.

    Names that a class without a roster happens to write itself are left out: "it will limit" holds Will Li.
    """
    names = {name for course in courses for name in course.names}
    works = [course.work for course in courses if course.truth is None]
    texts = [
        path.read_text("utf-8", "replace").casefold() for work in works for path in work.rglob("*") if path.is_file()
    ]
    kept = [name for name in sorted(names) if not any(name.casefold() in text for text in texts)]
    assert len(kept) > 0.9 * len(names), f"{len(names) - len(kept)} of {len(names)} names are in other people's work"
    return kept

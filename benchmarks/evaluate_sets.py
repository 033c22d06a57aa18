"""Published sets of graded work, as `kvasir evaluate` takes it: a class for each question, and a CSV of hand grades.

SAF (Short Answer Feedback, Filighera et al., ACL 2022): a question's answers lie in files of one name in `training` and
`unseen_answers`; scores from 0 to 1 are taken to the nearest eighth. The DigiKlausur exam: the notebooks' 17 mandatory
questions, each the cell that follows `**Question N**`; 0, 1 or 2 points.
"""

import csv
import json
import os
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

DATA = Path(os.environ.get("KVASIR_DATASETS") or Path(__file__).resolve().parents[2] / "shared" / "datasets")
_QUESTION = re.compile(r"\*\*Question (\d+)\*\*(.*)", re.DOTALL)
_MANDATORY = 17


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its answers and what a person gave for each."""

    name: str
    text: str
    reference: str  # "": none is known
    answers: tuple[tuple[str, float], ...]
    points: int = 1
    step: float = 0.125

    def sample(self, count: int, seed: int) -> "Question":
        """So many of its answers, drawn by the seed; all if there are no more."""
        chosen = random.Random(f"{seed} {self.name}").sample(self.answers, min(count, len(self.answers)))
        return replace(self, answers=tuple(chosen))

    def write_class(self, folder: Path) -> Path:
        """Write submissions, rubric.yaml, hand.csv, and solution.md where there is a reference; returns the folder."""
        (folder / "submissions").mkdir(parents=True, exist_ok=True)
        rows = []
        for number, (answer, points) in enumerate(self.answers):
            name = f"answer{number:03d}.md"
            (folder / "submissions" / name).write_text(answer or "-", "utf-8")
            rows.append((name, "answer", f"{points:g}", "person"))
        with (folder / "hand.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("submission", "criterion", "points", "rater"), *rows])
        criterion = {"id": "answer", "title": "Answers the question", "points": self.points, "step": self.step}
        rubric = {"title": self.name, "instructions": self.text, "criteria": [criterion | {"model": "feedback"}]}
        (folder / "rubric.yaml").write_text(yaml.safe_dump(rubric, sort_keys=False), "utf-8")
        if self.reference:
            (folder / "solution.md").write_text(self.reference, "utf-8")
        return folder


def saf(language: str, folder: Path = DATA) -> list[Question]:
    """The questions of SAF's part that is there, in `english` or `german`; [] where there is none."""
    by_name: dict[str, Question] = {}
    for path in sorted(folder.glob(f"saf/data/*/{language}/*.xml")):
        root = ET.parse(path).getroot()
        text = " ".join((root.findtext("questionText") or "").split())
        reference = " ".join(element.text or "" for element in root.iter("referenceAnswer"))
        answers = tuple(
            ((answer.findtext("response") or "").strip(), _eighth(answer.findtext("score") or ""))
            for answer in root.iter("studentAnswer")
        )
        known = by_name.get(path.name, Question(path.stem, text, reference, ()))
        by_name[path.name] = replace(known, answers=known.answers + answers)
    return list(by_name.values())


def _eighth(score: str) -> float:
    return round(float(score.replace(",", ".")) * 8) / 8


def exams(folder: Path = DATA) -> list[Question]:
    """The exam's mandatory questions; [] where it isn't there."""
    grades = folder / "digiklausur" / "grades.csv"
    if not grades.is_file():
        return []
    rows = {row["Question"]: row for row in csv.DictReader(grades.read_text("utf-8").splitlines())}
    questions: dict[str, Question] = {}
    for path in sorted(grades.parent.glob("notebooks/*.ipynb")):
        student = f"usb{int(path.stem.rpartition('-')[2])}"
        for number, text, answer in _cells(path):
            known = questions.get(number, Question(f"Question {number}", text, "", (), points=2, step=1))
            answers = (*known.answers, (answer, float(rows[number][student])))
            questions[number] = replace(known, answers=answers)
    return [questions[number] for number in sorted(questions, key=int)]


def _cells(path: Path) -> Iterator[tuple[str, str, str]]:
    """Each mandatory question's number and text, and what was written below it."""
    number = text = ""
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if match := _QUESTION.search(source):
            number, text = match[1], match[2].strip()
        elif number and int(number) <= _MANDATORY and cell["metadata"].get("nbgrader", {}).get("solution"):
            yield number, text, source.strip()
            number = ""

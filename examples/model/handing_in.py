"""A made-up class on disk, as a course team has it: rubric, solution and submissions, ready for `kvasir grade`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from examples.homework.notebook import PYTHON, Cell, R, code, notebook, printed, text
from examples.model.assignments import Labelled, LabelledClass
from grading.rubric.rubric import Rubric
from grading.submissions.reading import Submission, SubmissionPart

RUBRIC, SOLUTION, SUBMISSIONS = "rubric.json", "solution.ipynb", "submissions"


def write_class(folder: Path, made: LabelledClass, submissions: Sequence[Labelled]) -> None:
    """Write the assignment and these submissions of its class. `folder` must not hold another class."""
    (folder / SUBMISSIONS).mkdir(parents=True)
    _write(folder / RUBRIC, rubric_json(made.rubric))
    _write(folder / SOLUTION, _notebook(made.solution))
    for labelled in submissions:
        name, content = handed_in(labelled)
        _write(folder / SUBMISSIONS / name, content)


def handed_in(labelled: Labelled) -> tuple[str, str]:
    """The file's name and text that are read back as this submission."""
    submission = labelled.submission
    if labelled.kind == "notebook":
        return f"{submission.name}.ipynb", _notebook(submission)
    suffix = ".md" if labelled.kind == "prose" else {"R": ".R", "Python": ".py"}[submission.language]
    return submission.name + suffix, "\n".join(part.text for part in submission.parts) + "\n"


def rubric_json(rubric: Rubric) -> str:
    """The rubric as `load_rubric` reads it."""
    criteria = [
        {name: value for name, value in asdict(criterion).items() if name != "minimum"}
        | ({"deduction": -criterion.minimum} if criterion.minimum else {})
        for criterion in rubric.criteria
    ]
    return json.dumps({"title": rubric.title, "instructions": rubric.instructions, "criteria": criteria}, indent=1)


def _notebook(submission: Submission) -> str:
    cells: list[Cell] = []
    for part in submission.parts:
        if part.kind == "output" and cells:
            cells[-1]["outputs"].append(printed(part.text + "\n"))
        else:
            cells.append(_cell(part))
    return notebook(R if submission.language == "R" else PYTHON, *cells)


def _cell(part: SubmissionPart) -> Cell:
    if part.kind == "text":
        return text(part.text)
    return code(part.text) if part.kind == "code" else code("", printed(part.text + "\n"))


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8", newline="\n")

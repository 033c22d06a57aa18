"""Training classes made more like what is handed in: longer code, more cells, a template, other languages.

Labels stay: what is added reports no variable, and is made of training words. Exams stay as `make_class` makes them.
"""

from collections.abc import Sequence
from dataclasses import replace

from examples.model import corpus
from examples.model.assignments import Asked, Labelled, LabelledClass
from examples.model.worlds import Draw
from grading.submissions.reading import Submission, SubmissionPart

_HEADINGS = ("Results", "Homework", "Answers", "Notes")
_SCHEMES = ("cell {}", "cell {}", "chunk {}", "file {}, script")


def vary(made: LabelledClass, draw: Draw) -> LabelledClass:
    """The same class with the same labels."""
    language = made.solution.language
    solution = replace(made.solution, parts=_numbered(_longer(made.solution.parts, made.asked, language, draw), draw))
    template = _template(language, draw) if draw.random() < 0.6 else None
    submissions = tuple(_varied(labelled, made.asked, draw) for labelled in made.submissions)
    return replace(made, solution=solution, submissions=submissions, template=template)


def _varied(labelled: Labelled, asked: Sequence[Asked], draw: Draw) -> Labelled:
    submission = labelled.submission
    if draw.random() < 0.4:
        return labelled
    language = draw.choice(("SQL", "")) if draw.random() < 0.15 else submission.language
    parts = _longer(submission.parts, asked, submission.language or "R", draw)
    images = int(draw.random() < 0.1)
    new = replace(submission, language=language, parts=_numbered(parts, draw), images_left_out=images)
    return replace(labelled, submission=new)


def _template(language: str, draw: Draw) -> Submission:
    parts = [_heading(draw), _code(language, draw), SubmissionPart("text", f"## {corpus.sentence(draw)}", "")]
    return Submission("template", language, _numbered(parts, draw))


def _longer(parts: Sequence[SubmissionPart], asked: Sequence[Asked], language: str, draw: Draw) -> list[SubmissionPart]:
    made: list[SubmissionPart] = [_heading(draw)] if draw.random() < 0.5 else []
    for part in parts:
        if part.kind != "output" and draw.random() < 0.3:
            made.append(_code(language, draw))
        made.append(replace(part, text=_padded(part, asked, language, draw)))
    return [*made, _code(language, draw)] if draw.random() < 0.2 else made


def _padded(part: SubmissionPart, asked: Sequence[Asked], language: str, draw: Draw) -> str:
    lines = part.text.split("\n")
    if part.kind == "output":
        return "\n".join([*lines, f"[1] {draw.randint(1, 99)}"] if draw.random() < 0.2 else lines)
    if part.kind == "text":
        more = [corpus.sentence(draw) for _ in range(draw.choice((0, 0, 1)))]
        return draw.choice(("\n", "\n\n")).join([*more, *lines] if draw.random() < 0.5 else [*lines, *more])
    names = [item.variable for item in asked if item.criterion.model == "code"]
    told = [f"report({name})" for name in names] if draw.random() < 0.4 else []
    return "\n".join([*_code_lines(language, draw), *lines, *told])


def _heading(draw: Draw) -> SubmissionPart:
    return SubmissionPart("text", f"# {draw.choice(_HEADINGS)} {draw.randint(1, 9)}\n{corpus.sentence(draw)}", "")


def _code(language: str, draw: Draw) -> SubmissionPart:
    return SubmissionPart("code", "\n".join(_code_lines(language, draw) or ["# your code here"]), "")


def _code_lines(language: str, draw: Draw) -> list[str]:
    """Up to eight lines of code without sense."""
    return corpus.code(draw, language).split("\n")[: draw.choice((0, 2, 4, 8))]


def _numbered(parts: Sequence[SubmissionPart], draw: Draw) -> tuple[SubmissionPart, ...]:
    scheme, number, made = draw.choice(_SCHEMES), 0, []
    for part in parts:
        number += part.kind != "output"
        where = scheme.format(number)
        made.append(replace(part, location=f"{where}, output" if part.kind == "output" else where))
    return tuple(made)

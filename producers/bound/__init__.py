"""A sample of a class, graded by hand without seeing the model's points, and what it promises of the rest.

    draw(folder, Plan(), by="Ada")   draws it, and writes bound.json and hand-grades.csv
    bound_of(folder)                 agreement and the sentence, once the sample is graded

`producers.grading.bound` has the arithmetic, docs/grading.md says what is promised and what is not.
"""

from producers.bound.answer import Bound, Part, as_json, bound_of, sections, words
from producers.bound.draw import SHEET, Draw, Plan, Stratum, draw, drawn, is_drawn, more
from producers.bound.sheet import HandGrade, read_sheet_of
from producers.grading.bound import BoundError

__all__ = [
    "SHEET",
    "Bound",
    "BoundError",
    "Draw",
    "HandGrade",
    "Part",
    "Plan",
    "Stratum",
    "as_json",
    "bound_of",
    "draw",
    "drawn",
    "is_drawn",
    "more",
    "read_sheet_of",
    "sections",
    "words",
]

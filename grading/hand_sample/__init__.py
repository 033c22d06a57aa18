"""A sample of a class, graded by hand without seeing the model's points, and what it promises of the rest.

    draw(folder, Plan(), by="Ada")   draws it, and writes bound.json and hand-grades.csv
    give(folder, item, id, "2", "")  points for one criterion, as they are typed; the sheet may be filled in at once too
    bound_of(folder)                 agreement and the sentence, once the sample is graded

`grading.error_bound` has the arithmetic, docs/grading.md says what is promised and what is not.
"""

from grading.error_bound import BoundError
from grading.hand_sample.answer import (
    Bound,
    agreement_row,
    as_json,
    bound_of,
    prospect,
    sections,
    words,
    words_of,
)
from grading.hand_sample.draw import (
    SHEET,
    Draw,
    Plan,
    changed,
    draw,
    drawn,
    is_drawn,
    more,
    strata_from,
    undecided,
)
from grading.hand_sample.sheet import SheetConflict, give, given

__all__ = [
    "SHEET",
    "Bound",
    "BoundError",
    "Draw",
    "Plan",
    "SheetConflict",
    "agreement_row",
    "as_json",
    "bound_of",
    "changed",
    "draw",
    "drawn",
    "give",
    "given",
    "is_drawn",
    "more",
    "prospect",
    "sections",
    "strata_from",
    "undecided",
    "words",
    "words_of",
]

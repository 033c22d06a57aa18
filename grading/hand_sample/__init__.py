"""A sample of a class that is graded by hand without seeing the model's points, and the bound that follows from it.

    draw_sample(folder, SamplePlan(), by="Ada")  draws the sample, and writes bound.json and hand-grades.csv
    enter_points(folder, item, id, "2", "")      enters points for one criterion; instead, the whole sheet may be
                                                 filled in by hand
    bound_of(folder)                             gives agreement and the bound, once the sample is graded

`grading.error_bound` does the computation. docs/explanation/grading.md says what is promised and what is not.
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
    SamplePlan,
    SheetConflict,
    changed_submissions,
    draw_more,
    draw_sample,
    enter_points,
    entered_points,
    is_drawn,
    load_draw,
    strata_from,
    undecided_members,
)

__all__ = [
    "SHEET",
    "Bound",
    "BoundError",
    "Draw",
    "SamplePlan",
    "SheetConflict",
    "agreement_row",
    "as_json",
    "bound_of",
    "changed_submissions",
    "draw_more",
    "draw_sample",
    "enter_points",
    "entered_points",
    "is_drawn",
    "load_draw",
    "prospect",
    "sections",
    "strata_from",
    "undecided_members",
    "words",
    "words_of",
]

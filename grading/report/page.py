"""Makes report.html: a class's grades on one self-contained page.

The page makes no requests: style and script are inside, and its content security policy names them by their hashes.
Everything that a student or a model wrote is escaped. The page can be read on a phone, on paper, in dark mode, and
without scripts.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from grading.charts.drawing import STYLE, Bar, Picture, columns, histogram
from grading.points import Grade, criterion_points
from grading.report.grades import count_states, show_distribution, show_points
from grading.rubric.rubric import Criterion, Rubric
from producers.words import plural

_TEMPLATE = "report_page.html.j2"
# Characters that HTML forbids: control characters other than tab and line breaks, surrogates, and non-characters.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def render_page(
    grades: Sequence[Grade],
    rubric: Rubric,
    facts: Iterable[tuple[str, str]],
    notice: str = "",
    pictures: Sequence[Picture] = (),
    late: Mapping[str, str] | None = None,
    alarms: Sequence[str] = (),
) -> str:
    """Render the page as HTML.

    Args:
        grades: in the order in which they are listed.
        facts: (label, value) about the run, shown under the title.
        notice: a banner across the top; "" for none.
        pictures: charts of the run, shown after the criteria.
        late: deductions for lateness in words, by submission.
        alarms: warnings about the class, shown like the notice.
    """
    return render_template(
        _TEMPLATE,
        grades=grades,
        rubric=rubric,
        facts=tuple(facts),
        notice=notice,
        lead=_lead(grades, rubric),
        criteria=[(criterion, *_criterion_figures(grades, criterion)) for criterion in rubric.criteria],
        totals=_totals(grades, rubric),
        pictures=pictures,
        late=late or {},
        alarms=alarms,
    )


def render_template(name: str, **fields: Any) -> str:
    """Render this folder's template `name` with the report's style, without characters that HTML does not allow."""
    return _FORBIDDEN.sub("�", _template(name).render(fields))


@cache
def _template(template_name: str) -> Any:
    """Load a template with everything that is the same on every page.

    Jinja is imported here, because most commands need none.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    template_globals: dict[str, object] = {
        "plural": plural,
        "reached": criterion_points,
        "distribution": show_distribution,
        "drawn": lambda picture: Markup(picture.inline()),
    }
    for name, kind in (("style", "css"), ("script", "js")):
        source = (folder / f"report_page.{kind}").read_text("utf-8") + (STYLE if kind == "css" else "")
        # The page's content security policy allows only a source with this digest.
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        # The page's own style and script are not escaped. Charts are not escaped either, because they escape their
        # texts themselves.
        template_globals |= {name: Markup(source), f"{name}_hash": f"sha256-{digest}"}
    return environment.get_template(template_name, globals=template_globals)


def _lead(grades: Sequence[Grade], rubric: Rubric) -> str:
    """Return the numbers about the class for the line under the title."""
    counts = [f"{count} {state}" for state, count in count_states(grades).items() if count]
    review = f"{sum(grade.needs_review for grade in grades)} of {len(grades)} need review"
    return " · ".join(
        [plural(len(grades), "submission"), *counts, review, f"out of {show_points(rubric.total)} points"]
    )


def _criterion_figures(grades: Sequence[Grade], criterion: Criterion) -> tuple[float | None, tuple[Bar, ...]]:
    """Return the mean and distribution of all who handed something in and got points; None and () if nobody did."""
    handed_in = (criterion_points(grade.criteria, criterion.id) for grade in grades if grade.state != "empty")
    class_points = [points for points in handed_in if points is not None]
    return (
        (fmean(class_points), histogram(class_points, criterion.points, criterion.step)) if class_points else (None, ())
    )


def _totals(grades: Sequence[Grade], rubric: Rubric) -> tuple[str, Picture | None]:
    """Describe the totals of all graded submissions in words and as a chart."""
    totals = [grade.points for grade in grades if grade.state == "graded" and grade.points is not None]
    if not totals:
        return "", None
    middle = f"median {median(totals):.3g}, mean {fmean(totals):.3g}"
    bars = histogram(totals, rubric.total, min(criterion.step for criterion in rubric.criteria))
    return (
        f"{plural(len(totals), 'graded submission')}: {middle}",
        columns("Submissions by points", "points", "submissions", {"model": bars}),
    )

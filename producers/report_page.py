"""report.html: a class's grades on one page that needs nothing else.

No request leaves the page: style and script are inside, named by their hashes in its content security policy, and
everything that a student or a model wrote is escaped. It reads on a phone, on paper, in the dark, and without script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from statistics import fmean

from producers.grading import CriterionGrade, Grade, GradeState
from producers.prompts import plural
from producers.report import count_states, show_points
from producers.report_style import SCRIPT, STYLE
from producers.rubric import Criterion, Points, Rubric
from producers.truncation import Cut

# Controls but for tab and line break, halves of surrogate pairs, and non-characters: what HTML doesn't allow.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


def render_page(grades: Sequence[Grade], rubric: Rubric, facts: Iterable[tuple[str, str]], notice: str = "") -> str:
    """The page as HTML.

    Args:
        grades: in the order in which they are listed.
        facts: (label, value) about the run, shown under the title.
        notice: a banner across the top; "" for none.
    """
    body = [
        f'<p class="notice" role="note">{_text(notice)}</p>' if notice else "",
        "<main>",
        _header(grades, rubric, facts),
        _class_table(grades, rubric),
        _criteria_table(grades, rubric),
        '<section aria-labelledby="submissions"><div class="bar"><h2 id="submissions">Submissions</h2>',
        '<button type="button" id="all" hidden>Open all</button></div>',
        *(_submission(number, grade) for number, grade in enumerate(grades, 1)),
        "</section>",
        "</main>",
    ]
    return "\n".join(
        [_head(rubric.title), *(line for line in body if line), f"<script>{SCRIPT}</script>", "</body></html>"]
    )


def _head(title: str) -> str:
    policy = (
        f"default-src 'none'; style-src '{_source_hash(STYLE)}'; script-src '{_source_hash(SCRIPT)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="robots" content="noindex">
<meta name="color-scheme" content="light dark">
<title>{_text(title)} · grades</title>
<style>{STYLE}</style>
</head>
<body>"""


def _source_hash(source: str) -> str:
    """How a content security policy names an inline source."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def _header(grades: Sequence[Grade], rubric: Rubric, facts: Iterable[tuple[str, str]]) -> str:
    counts = [f"{count} {state}" for state, count in count_states(grades).items() if count]
    lead = " · ".join([plural(len(grades), "submission"), *counts, f"out of {show_points(rubric.total)} points"])
    pairs = "".join(f"<div><dt>{_text(label)}</dt><dd>{_text(value)}</dd></div>" for label, value in facts)
    facts_list = f'<dl class="facts">{pairs}</dl>' if pairs else ""
    return f'<header><h1>{_text(rubric.title)}</h1><p class="lead">{lead}</p>{facts_list}</header>'


# --- the class ---


def _class_table(grades: Sequence[Grade], rubric: Rubric) -> str:
    columns = "".join(
        f'<th scope="col" class="num wide" title="{_text(criterion.title)}">{_text(criterion.id)}</th>'
        for criterion in rubric.criteria
    )
    rows = "\n".join(_class_row(number, grade, rubric) for number, grade in enumerate(grades, 1))
    return f"""<section aria-labelledby="class"><h2 id="class">Class</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">Submission</th><th scope="col" class="num">Points</th>{columns}
<th scope="col">To check</th></tr></thead>
<tbody>
{rows}
</tbody></table></div></section>"""


def _class_row(number: int, grade: Grade, rubric: Rubric) -> str:
    points = {criterion.id: criterion.points for criterion in grade.criteria}
    cells = "".join(f'<td class="num wide">{_points(points.get(criterion.id))}</td>' for criterion in rubric.criteria)
    return (
        f'<tr><th scope="row"><a href="#s{number}">{_text(grade.submission)}</a></th>'
        f'<td class="num">{_points(grade.points)}</td>{cells}<td>{_to_check(grade)}</td></tr>'
    )


def _to_check(grade: Grade) -> str:
    flags = f'<span class="flags">{plural(len(grade.flags), "flag")}</span>' if grade.flags else ""
    return " ".join(part for part in (_badge(grade.state), flags) if part) or '<span class="quiet">–</span>'


def _badge(state: GradeState) -> str:
    return "" if state == "graded" else f'<span class="badge {state}">{state}</span>'


def _criteria_table(grades: Sequence[Grade], rubric: Rubric) -> str:
    rows = "\n".join(_criterion_row(grades, criterion) for criterion in rubric.criteria)
    return f"""<section aria-labelledby="criteria"><h2 id="criteria">Criteria</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">Criterion</th><th scope="col" class="num">Points</th><th scope="col" class="num">Mean</th>
<th scope="col" class="meter"><span class="hidden">Share</span></th></tr></thead>
<tbody>
{rows}
</tbody></table></div>
<p class="quiet">Means leave out empty submissions and criteria without points.</p></section>"""


def _criterion_row(grades: Sequence[Grade], criterion: Criterion) -> str:
    handed_in = (item for grade in grades if grade.state != "empty" for item in grade.criteria)
    reached = [item.points for item in handed_in if item.id == criterion.id and item.points is not None]
    mean = fmean(reached) if reached else None
    share = "" if mean is None else f'<meter min="0" max="{criterion.points}" value="{mean:.4f}">{mean:.2f}</meter>'
    return (
        f'<tr><th scope="row">{_text(criterion.title)}<br><span class="quiet">{_text(criterion.id)}</span></th>'
        f'<td class="num">{show_points(criterion.points)}</td>'
        f'<td class="num">{"–" if mean is None else f"{mean:.2f}"}</td><td class="meter">{share}</td></tr>'
    )


# --- one submission ---


def _submission(number: int, grade: Grade) -> str:
    sections = [
        f'<p class="reason">{_text(grade.reason)}</p>' if grade.reason else "",
        f'<p class="summary">{_text(grade.summary)}</p>' if grade.summary else "",
        *(_criterion(item) for item in grade.criteria if grade.state in ("graded", "incomplete")),
        _list("To check", grade.flags),
        _list(
            "Left out of the prompt",
            [_cut(cut) for cut in grade.cuts],
        ),
    ]
    content = "\n".join(section for section in sections if section)
    out_of = f'{_points(grade.points)}<span class="quiet"> / {show_points(grade.max_points)}</span>'
    return f"""<details id="s{number}"><summary><h3>{_text(grade.submission)}</h3>
{_badge(grade.state)}<span class="score">{out_of}</span></summary>
<div class="work">
{content}
</div></details>"""


def _criterion(item: CriterionGrade) -> str:
    out_of = f'{_points(item.points)}<span class="quiet"> / {show_points(item.max_points)}</span>'
    said = [
        f'<p class="reason">No points: {_text(item.reason)}</p>' if item.points is None else "",
        f"<p>{_text(item.feedback)}</p>" if item.feedback else "",
        _evidence(item) if item.points is not None else "",
    ]
    return f"""<article><h4><span>{_text(item.title)}</span><span class="score">{out_of}</span></h4>
{"".join(said)}</article>"""


def _evidence(item: CriterionGrade) -> str:
    if item.evidence_state == "none given":
        return '<p class="quiet">No evidence given.</p>'
    warning = '<p class="warning">This passage is not in the submission.</p>' if item.evidence_state != "found" else ""
    return f'<blockquote class="{item.evidence_state.replace(" ", "-")}">{_text(item.evidence)}</blockquote>{warning}'


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f'<h4 class="aside">{title}</h4><ul>{items}</ul>' if lines else ""


def _cut(cut: Cut) -> str:
    return f"{cut.kind}, {cut.where}: {cut.dropped_tokens:,} of {cut.kept_tokens + cut.dropped_tokens:,} tokens"


def _points(points: Points | None) -> str:
    return '<span class="quiet">–</span>' if points is None else show_points(points)


def _text(text: str) -> str:
    """Anybody's text as HTML text or attribute value, without characters that no HTML or UTF-8 may hold."""
    return escape(_FORBIDDEN.sub("�", text))

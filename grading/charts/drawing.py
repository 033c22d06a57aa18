"""Draws four kinds of chart as SVG: columns, points, lines and time spans.

A chart is as wide as its place on the page: horizontal positions are percentages and text keeps its size, so it can be
read on a phone. Each chart has a title, labelled axes and a text alternative. Text that people or models wrote is
escaped.
"""

import base64
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from grading.rubric.rubric import Points, exact, plain

# The chart's left and right edges, in percent of the width.
_LEFT, _RIGHT = 8.0, 99.0
# Height in pixels of the area that shows columns, points or lines.
_HEIGHT = 150
# Pixels from one line of text to the next.
_LINE = 18
# Height in pixels of one slot's row.
_LANE = 12
# If there are more spans than this, spans are joined where nobody could see the gap between them.
_MANY_SPANS = 2_000
_SHADES = 5
MAX_BARS = 12  # on a phone, a chart with more bars can't be read

# People with colour blindness can tell these colours apart (after Okabe and Ito). Their contrast is at least 3:1.
_LIGHT = ("#1d1f21", "#63666a", "#d9d6cf", ("#0072b2", "#d55e00", "#00805d", "#b0568a", "#6b6b6b"))
_DARK = ("#f2f0ec", "#b4b1ab", "#44474d", ("#56b4e9", "#e69f00", "#35c49a", "#e39cc4", "#c0c0c0"))


def _style(ink: str, quiet: str, line: str, shades: Sequence[str]) -> str:
    colours = "".join(f".chart .k{number}{{fill:{shade};stroke:{shade}}}" for number, shade in enumerate(shades))
    return (
        f".chart text{{fill:{quiet}}}.chart .title{{fill:{ink}}}.chart .rule{{stroke:{line}}}"
        f".chart .even{{stroke:{quiet}}}{colours}"
    )


_FORM = (
    ".chart{display:block;font:12px system-ui,sans-serif;font-variant-numeric:tabular-nums}"
    ".chart .title{font-size:14px;font-weight:600}.chart rect,.chart circle{stroke-width:0}"
    ".chart circle{fill-opacity:.65}.chart .line{stroke-width:2}.chart .even{stroke-dasharray:4 4}"
)
STYLE = f"{_FORM}{_style(*_LIGHT)}@media (prefers-color-scheme:dark){{{_style(*_DARK)}}}"


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn chart. `words` describes it for people who can't see it."""

    title: str
    words: str
    height: int
    body: str

    def inline(self) -> str:
        """Return the SVG element for a page that includes `STYLE`."""
        return self._element("", "")

    def file(self, dark: bool | None = None) -> str:
        """Return the SVG as a file. If `dark` is None, it follows the reader's system setting."""
        style = STYLE if dark is None else _FORM + _style(*(_DARK if dark else _LIGHT))
        ground = ".chart{background:#fff}@media (prefers-color-scheme:dark){.chart{background:#17181a}}"
        return self._element(
            ' xmlns="http://www.w3.org/2000/svg"', f"<style>{style}{ground if dark is None else ''}</style>"
        )

    def image(self, dark: bool) -> str:
        """Return an `img` element with the chart, for a page that allows no SVG."""
        data = base64.b64encode(self.file(dark).encode()).decode()
        return (
            f'<img alt="{escape(self._alternative())}" width="100%" height="{self.height}" '
            f'src="data:image/svg+xml;base64,{data}">'
        )

    def _element(self, space: str, style: str) -> str:
        return (
            f'<svg{space} class="chart" role="img" width="100%" height="{self.height}" '
            f'aria-label="{escape(self._alternative())}">{style}{self.body}</svg>'
        )

    def _alternative(self) -> str:
        return f"{self.title}. {self.words}"


@dataclass(frozen=True, slots=True)
class Bar:
    """How often (`count`) a value was one of the points in `label`: `7`, or `6–8`, which includes both ends."""

    label: str
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """What a slot did from `start_s` to `end_s`. Spans of one row that overlap are drawn in separate lanes."""

    row: str
    kind: str
    start_s: float
    end_s: float


def histogram(values: Iterable[Points], maximum: Points, step: Points) -> tuple[Bar, ...]:
    """Count values into bars for 0 to `maximum` in steps of `step`, lowest first.

    There is one bar for each step, or at most MAX_BARS bars of equally many steps; the last bar may have fewer. A value
    between two steps counts for the lower one. Values above `maximum` go to the last bar, and values below 0 to the
    first.
    """
    width, steps = exact(step), int(exact(maximum) / exact(step)) + 1
    steps_per_bar = -(-steps // MAX_BARS)
    bar_counts = Counter(max(0, min(int(exact(value) / width), steps - 1)) // steps_per_bar for value in values)
    bars = []
    for first in range(0, steps, steps_per_bar):
        low, high = plain(first * width), plain(min(first + steps_per_bar, steps) * width - width)
        bars.append(Bar(f"{low}" if low == high else f"{low}–{high}", bar_counts[first // steps_per_bar]))
    return tuple(bars)


def columns(title: str, across: str, up: str, series: Mapping[str, Sequence[Bar]]) -> Picture:
    """Draw columns for each label side by side, one for each series. All series have the same labels."""
    first_bars = next(iter(series.values()))
    ticks, maximum = _scale(max(bar.count for bars in series.values() for bar in bars), whole=True)
    top, head = _head(title, series, up)
    width = (_RIGHT - _LEFT) / len(first_bars)
    bar_width = 0.84 * width / len(series)
    body = [head, _rules(top, ticks, maximum)]
    for number, (name, bars) in enumerate(series.items()):
        for place, bar in enumerate(bars):
            bar_height = bar.count / maximum * _HEIGHT
            x = _LEFT + place * width + 0.08 * width + number * bar_width
            tooltip = f"{name}, {bar.label}: {bar.count}"
            body.append(_rect(x, top + _HEIGHT - bar_height, bar_width * 0.96, bar_height, number, tooltip))
    label_interval = 2 if len(first_bars) > 8 and max(len(bar.label) for bar in first_bars) > 3 else 1
    body += [
        _text(_LEFT + (place + 0.5) * width, top + _HEIGHT + 16, first_bars[place].label, "middle")
        for place in range(0, len(first_bars), label_interval)
    ]
    body.append(_text((_LEFT + _RIGHT) / 2, top + _HEIGHT + 36, across, "middle"))
    words = [f"{name}: {', '.join(f'{bar.label} ×{bar.count}' for bar in bars)}" for name, bars in series.items()]
    return Picture(title, "; ".join(words), top + _HEIGHT + 46, "".join(body))


def points(title: str, across: str, up: str, pairs: Mapping[tuple[float, float], int], maximum: float) -> Picture:
    """Draw a circle for each pair (across, up); its area shows how often the pair occurs.

    Values go from 0 to `maximum`.

    Both values are equal on the dashed line.
    """
    top, head = _head(title, (), f"{up}; dashed: both the same")
    largest = max(pairs.values(), default=1)

    def x(value: float) -> float:
        return _LEFT + 2 + value / maximum * (_RIGHT - _LEFT - 4)

    def y(value: float) -> float:
        return top + 10 + (1 - value / maximum) * (_HEIGHT - 10)

    ticks, maximum = _scale(maximum)
    body = [head, _rules(top + 10, ticks, maximum, _HEIGHT - 10)]
    body.append(f'<line class="even" x1="{x(0):.2f}%" y1="{y(0):.1f}" x2="{x(maximum):.2f}%" y2="{y(maximum):.1f}"/>')
    for (across_value, up_value), count in sorted(pairs.items(), key=lambda pair_count: -pair_count[1]):
        radius = 4 + 6 * math.sqrt(count / largest)
        tooltip = f"{across_value:g} and {up_value:g}: {count}"
        body.append(
            f'<circle class="k0" cx="{x(across_value):.2f}%" cy="{y(up_value):.1f}" r="{radius:.1f}">'
            f"<title>{escape(tooltip)}</title></circle>"
        )
    body += [_text(x(tick), top + _HEIGHT + 24, f"{tick:g}", "middle") for tick in ticks]
    body.append(_text((_LEFT + _RIGHT) / 2, top + _HEIGHT + 44, across, "middle"))
    equal_count = sum(count for (across_value, up_value), count in pairs.items() if across_value == up_value)
    above_count = sum(count for (across_value, up_value), count in pairs.items() if up_value > across_value)
    total = sum(pairs.values())
    words = (
        f"Of {total}, {equal_count} the same, {above_count} above the line, {total - equal_count - above_count} below"
    )
    return Picture(title, words, top + _HEIGHT + 54, "".join(body))


def lines(title: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Picture:
    """Draw a step line for each series of (seconds, value), sorted by time. Each value holds until the next."""
    length_s = max((at for steps in series.values() for at, _ in steps), default=0) or 1.0
    ticks, maximum = _scale(max((value for steps in series.values() for _, value in steps), default=0), whole=True)
    top, head = _head(title, series, up)
    body = [head, _rules(top, ticks, maximum)]
    for number, steps in enumerate(series.values()):
        # If several values fall on one pixel, only the last is drawn.
        steps_by_pixel = {int(at / length_s * 700): (at, value) for at, value in steps}
        # Each value is drawn until the next value begins. The last value is drawn until the end of the chart.
        corners = [
            (_LEFT + at / length_s * (_RIGHT - _LEFT), top + (1 - value / maximum) * _HEIGHT)
            for (start, value), (end, _) in itertools.pairwise([*steps_by_pixel.values(), (length_s, 0.0)])
            for at in (start, end)
        ]
        body += [
            f'<line class="line k{number % _SHADES}" x1="{x:.2f}%" y1="{y:.1f}" x2="{next_x:.2f}%" y2="{next_y:.1f}"/>'
            for (x, y), (next_x, next_y) in itertools.pairwise(corners)
        ]
    body.append(_time_axis(top + _HEIGHT, length_s, _LEFT))
    words = [f"{name}: at most {max((v for _, v in steps), default=0):g}" for name, steps in series.items()]
    return Picture(title, f"{'; '.join(words)}; over {_time(length_s)}", top + _HEIGHT + 46, "".join(body))


def spans(title: str, all_spans: Iterable[Span]) -> Picture:
    """Draw a Gantt chart. Rows keep their order, and each has as many lanes as it has spans at the same time."""
    rows: dict[str, list[Span]] = {}
    for span in all_spans:
        rows.setdefault(span.row, []).append(span)
    kinds = dict.fromkeys(kind for spans in rows.values() for kind in sorted({span.kind for span in spans}))
    numbers = {kind: number % _SHADES for number, kind in enumerate(kinds)}
    length_s = max((span.end_s for spans in rows.values() for span in spans), default=0) or 1.0
    gap_s = length_s / 700 if sum(map(len, rows.values())) > _MANY_SPANS else -1.0
    y, head = _head(title, kinds, "")
    body, words = [head], []
    for row, row_spans in rows.items():
        lanes = _lanes(row_spans)
        body.append(_text(0, y + 10, row))
        y += _LINE
        for lane in lanes:
            for span in _merge_neighbours(lane, gap_s):
                tooltip = f"{span.kind}, {_time(span.start_s)} to {_time(span.end_s)}"
                width = max(0.15, (span.end_s - span.start_s) / length_s * _RIGHT - 0.1)
                body.append(_rect(span.start_s / length_s * _RIGHT, y, width, _LANE - 2, numbers[span.kind], tooltip))
            y += _LANE
        busy = sum(span.end_s - span.start_s for span in row_spans) / len(lanes) / length_s
        words.append(f"{row}: {len(row_spans)} in {len(lanes)} at once, busy {busy:.0%} of the time")
        y += 6
    body.append(_time_axis(y, length_s, 0))
    return Picture(title, f"{'; '.join(words)}; {_time(length_s)} in all", y + 46, "".join(body))


# --- parts


def _head(title: str, names: Iterable[str], up: str) -> tuple[int, str]:
    """Draw the title, the legend if there are several series, and the vertical axis's label.

    Also return where they end.
    """
    names = list(names)
    parts, y = [_text(0, 16, title, kind="title")], 16 + _LINE
    if len(names) > 1:
        column_count = 1 if max(map(len, names)) > 20 else 2
        for number, name in enumerate(names):
            column, line = 50 * (number % column_count), y + number // column_count * _LINE
            parts += _rect(column, line - 10, 1.5, 11, number % _SHADES), _text(column + 3, line, name)
        y += -(-len(names) // column_count) * _LINE
    if up:
        parts.append(_text(0, y, up))
    return y + 14 if up else y - 8, "".join(parts)


def _rules(top: float, ticks: Sequence[float], maximum: float, height: float = _HEIGHT) -> str:
    parts = []
    for tick in ticks:
        y = top + (1 - tick / maximum) * height
        parts.append(f'<line class="rule" x1="{_LEFT}%" x2="{_RIGHT}%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 1, y + 4, f"{tick:g}", "end"))
    return "".join(parts)


def _rect(x: float, top: float, width: float, height: float, shade: int, tooltip: str = "") -> str:
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return (
        f'<rect class="k{shade}" x="{x:.2f}%" y="{top:.1f}" width="{width:.2f}%" height="{height:.1f}">{title}</rect>'
    )


def _text(across: float, y: float, text: str, anchor: str = "start", kind: str = "label") -> str:
    return f'<text class="{kind}" x="{across:.2f}%" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _ticks(maximum: float, whole: bool = False) -> list[float]:
    """Return at most six ticks from 0, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(maximum / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if maximum / (power * factor) <= 5)
    step = max(1.0, step) if whole else step
    count = math.floor(maximum / step + 1e-9) + 1
    return [int(step * n) if whole else round(step * n, 6) for n in range(count)]


def _scale(maximum: float, whole: bool = False) -> tuple[list[float], float]:
    """Return the ticks up to the first one at or above `maximum`, and the value of that tick."""
    ticks = _ticks(maximum or 1.0, whole)
    if ticks[-1] < maximum:
        ticks.append(round(ticks[-1] + ticks[1], 6))
    return ticks, ticks[-1]


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Put spans into as few lanes as possible, so that no two in a lane overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        free = next((lane for lane in lanes if lane[-1].end_s <= span.start_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _merge_neighbours(lane: Iterable[Span], gap_s: float) -> list[Span]:
    """Join neighbouring spans of the same kind that are less than `gap_s` apart."""
    merged_spans: list[Span] = []
    for span in lane:
        if merged_spans and merged_spans[-1].kind == span.kind and span.start_s - merged_spans[-1].end_s <= gap_s:
            merged_spans[-1] = Span(span.row, span.kind, merged_spans[-1].start_s, span.end_s)
        else:
            merged_spans.append(span)
    return merged_spans


def _time_axis(y: float, length_s: float, start_x: float) -> str:
    unit_s, unit = next((pair for pair in ((3600.0, "hours"), (60.0, "minutes")) if length_s > 2 * pair[0]), (1.0, ""))
    length = length_s / unit_s
    parts = [f'<line class="rule" x1="{start_x}%" x2="{_RIGHT}%" y1="{y:.1f}" y2="{y:.1f}"/>']
    for tick in _ticks(length):
        across = start_x + tick / length * (_RIGHT - start_x)
        anchor = "start" if not tick else "end" if across > 95 else "middle"
        parts.append(_text(across, y + 16, f"{tick:g}", anchor))
    parts.append(_text((start_x + _RIGHT) / 2, y + 36, f"{unit or 'seconds'} since the start", "middle"))
    return "".join(parts)


def _time(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds > 7200
        else f"{seconds / 60:.1f} min"
        if seconds > 120
        else f"{seconds:.1f} s"
    )

"""The predicted run as a picture: the form in which a run that has been is drawn, too."""

from __future__ import annotations

from pathlib import Path

from grading.charts.drawing import Span, spans
from kvasir.plan.simulate import SimulatedRun
from messages.errors import UsageError


def write_chart(path: Path, run: SimulatedRun) -> None:
    """Draw who works when as an SVG file. Raises UsageError."""
    prefills = [Span(f"{p.machine} · prefill", p.job.model, p.started_s, p.ended_s) for p in run.prefills]
    answers = [Span(f"{t.machine} · decode", t.job.model, t.started_s, t.ended_s) for t in run.timings]
    bars = [*sorted(prefills, key=lambda bar: bar.row), *sorted(answers, key=lambda bar: bar.row)]
    try:
        path.write_text(spans("Who works when, as predicted", bars).file(), "utf-8")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}; name another file with --chart") from None

"""Charts of a run, from its results: who worked when, how many jobs waited, and how many were done.

Times in results count from the submission of their job. A run submits all jobs at its start, so these times can be
compared. A job that was submitted again later is drawn from its own submission.
"""

from collections.abc import Iterable, Sequence

from grading.charts.drawing import Picture, Span, lines, spans
from messages.jobs import JobResult


def pictures(results: Iterable[JobResult]) -> list[Picture]:
    """Draw progress, queues and a Gantt chart; an empty list until the first job has been decoded."""
    decoded_results = [result for result in results if result.decode.total_s > 0]
    if not decoded_results:
        return []
    # Without a prefill worker, a job leaves its first queue only when a decode worker takes it.
    prefill_starts = [(r.prefill if r.prefill.worker_id else r.decode).queue_s for r in decoded_results]
    prefill_ends = [_prefill_end(result) for result in decoded_results if result.prefill.worker_id]
    is_split = len(prefill_ends) == len(decoded_results)
    decode_starts, end_times = [r.decode.queue_s for r in decoded_results], [r.decode.total_s for r in decoded_results]
    return [
        lines("Answers over time", "jobs answered", {"answered": _steps([], end_times)}),
        lines(
            "Jobs that waited",
            "jobs",
            {
                "for prefill": _steps([0.0] * len(decoded_results), prefill_starts),
                **({"for decode": _steps(prefill_ends, decode_starts)} if is_split else {}),
            },
        ),
        spans("Who worked when", worker_spans(decoded_results)),
    ]


def worker_spans(results: Sequence[JobResult]) -> list[Span]:
    """Return what each worker did for each job. Prefill workers come first; workers are sorted by name."""
    prefill_spans = [
        Span(f"{result.prefill.worker_id} · prefill", result.model, result.prefill.queue_s, _prefill_end(result))
        for result in results
        if result.prefill.worker_id
    ]
    decode_spans = [
        Span(f"{result.decode.worker_id} · decode", result.model, result.decode.queue_s, result.decode.total_s)
        for result in results
        if result.decode.worker_id and result.decode.total_s > 0
    ]
    return [
        span for role_spans in (prefill_spans, decode_spans) for span in sorted(role_spans, key=lambda span: span.row)
    ]


def _prefill_end(result: JobResult) -> float:
    prefill = result.prefill
    return min(prefill.queue_s + prefill.prefill_s + prefill.put_s, result.decode.queue_s or float("inf"))


def _steps(up: Iterable[float], down: Iterable[float]) -> list[tuple[float, float]]:
    """Return, for each moment, how many jobs have entered and not left. Without `up`, it is how many have left."""
    arrivals = [(at, 1) for at in up]
    moves = sorted([*arrivals, *((at, -1 if arrivals else 1) for at in down)], key=lambda move: (move[0], -move[1]))
    level, steps = 0, [(0.0, 0.0)]
    for at, by in moves:
        level += by
        steps.append((at, float(level)))
    return steps

"""Measured rates, and durations in words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from messages.jobs import JobResult


@dataclass(frozen=True, slots=True)
class ModelRate:
    """What one model's results say about it. Rates that were not measured are 0."""

    model: str
    answers: int
    # The tokens that the engine computed, divided by the seconds that it needed for them.
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # for one sequence; all slots together decode more tokens per second
    transferred_answers: int  # number of answers decoded from a KV cache that another engine computed


def model_rates(results: Iterable[JobResult]) -> list[ModelRate]:
    """Return a rate for each model, by name, from the results that succeeded."""
    succeeded_results = [result for result in results if result.state == "succeeded"]
    models = sorted({result.model for result in succeeded_results})
    return [_rate(model, [result for result in succeeded_results if result.model == model]) for model in models]


def _rate(model: str, results: Sequence[JobResult]) -> ModelRate:
    computed_tokens = sum(result.prefill.computed_tokens for result in results)
    completion_tokens = sum(result.decode.completion_tokens for result in results)
    return ModelRate(
        model,
        len(results),
        _per(computed_tokens, sum(result.prefill.prefill_s for result in results)),
        _per(completion_tokens, sum(result.decode.decode_s for result in results)),
        sum(result.decode.kv_transfer != "none" for result in results),
    )


def duration(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0

"""How fast it goes, as measured, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from messages.jobs import JobResult


@dataclass(frozen=True, slots=True)
class ModelRate:
    """What one model's results say of it. Rates are 0 where nothing was measured."""

    model: str
    answers: int
    prefill_tokens_per_s: float  # of computed tokens, in the engine
    decode_tokens_per_s: float  # of one sequence; slots beside each other add up
    answer_tokens: float  # of one answer, on average
    transferred: int  # answers decoded from a KV cache that another engine computed


def model_rates(results: Iterable[JobResult]) -> list[ModelRate]:
    """A rate for each model, by name, from the results that succeeded."""
    done = [result for result in results if result.state == "succeeded"]
    models = sorted({result.model for result in done})
    return [_rate(model, [result for result in done if result.model == model]) for model in models]


def _rate(model: str, results: Sequence[JobResult]) -> ModelRate:
    computed = sum(result.prefill.computed_tokens for result in results)
    written = sum(result.decode.completion_tokens for result in results)
    return ModelRate(
        model,
        len(results),
        _per(computed, sum(result.prefill.prefill_s for result in results)),
        _per(written, sum(result.decode.decode_s for result in results)),
        _per(written, len(results)),
        sum(result.decode.kv_transfer != "none" for result in results),
    )


def per_hour(done: int, seconds: float) -> float:
    """Submissions an hour; 0 while nothing is known."""
    return _per(done, seconds) * 3600


def remaining_s(still_open: int, done: int, seconds: float) -> float | None:
    """Seconds for what is open, at the pace so far; None while nothing is done."""
    return still_open * seconds / done if done else None


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def forecast_s(prompt_tokens: int, prompts: int, repeated_tokens: int, rates: Iterable[ModelRate]) -> float | None:
    """Seconds for a class on one pair of workers, at the slowest measured rates; None if nothing was measured.

    Args:
        repeated_tokens: prompt tokens that the class shares, and that are therefore computed once only.
    """
    known = [rate for rate in rates if rate.prefill_tokens_per_s and rate.decode_tokens_per_s]
    if not known:
        return None
    prefill = (prompt_tokens - repeated_tokens) / min(rate.prefill_tokens_per_s for rate in known)
    decode = prompts * max(rate.answer_tokens / rate.decode_tokens_per_s for rate in known)
    return max(prefill, decode)  # the two stages work at the same time

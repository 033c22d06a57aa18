"""What a decode worker has measured, by model: how fast, how long the answers, how long a KV cache takes to come."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from decode_worker.stealing import FIRST_FETCH_S, expected_service_s
from messages.jobs import DecodeJob, DecodeReport

# A moving average forgets: what a batch is like now counts more than what last night's was like.
_WEIGHT = 0.1


class Average:
    """The plain mean of the first ten values, then a moving average of about the last ten. 0: nothing yet."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """One more value."""
        self._count += 1
        self.value += (value - self.value) * max(_WEIGHT, 1 / self._count)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one model on this worker; 0: nothing yet."""

    tokens_per_s: float = 0.0  # one sequence
    answer_tokens: float = 0.0  # of a whole job
    fetch_s: float = 0.0  # a KV cache, store to engine


class _Model:
    def __init__(self) -> None:
        self.tokens_per_s, self.answer_tokens, self.fetch_s = Average(), Average(), Average()


class Pace:
    """Averages over this worker's jobs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}

    def note(self, model: str, report: DecodeReport) -> None:
        """One more job is decoded."""
        if not report.completion_tokens or report.decode_s <= 0:
            return
        with self._lock:
            averages = self._models.setdefault(model, _Model())
            averages.tokens_per_s.add(report.completion_tokens / report.decode_s)
            averages.answer_tokens.add(report.completion_tokens)
            if report.handed_over_tokens:
                averages.fetch_s.add(report.get_s)

    def of(self, model: str) -> Measured:
        """What is known of a model."""
        with self._lock:
            known = self._models.get(model)
            if known is None:
                return Measured()
            return Measured(known.tokens_per_s.value, known.answer_tokens.value, known.fetch_s.value)

    def fetch_s(self, model: str) -> float:
        """Expected time for a KV cache to come: of this model, else of any, else a first guess."""
        with self._lock:
            known = [self._models[model]] if model in self._models else []
            values = [averages.fetch_s.value for averages in [*known, *self._models.values()]]
        return next((value for value in values if value > 0), FIRST_FETCH_S)

    def expected_s(self, job: DecodeJob) -> float:
        """Expected time of a job in a slot, from what is known before it is decoded."""
        measured = self.of(job.job.model)
        sampling = job.job.sampling
        most = sampling.max_tokens * sampling.answers
        tokens = min(most, measured.answer_tokens or most)
        return expected_service_s(tokens, measured.tokens_per_s, measured.fetch_s)

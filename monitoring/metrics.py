"""Turns events into Prometheus metrics. Workers only report events and know nothing of metrics.

Units are base units (seconds, bytes, tokens, joules), and names follow Prometheus's conventions. Labels have few
values: model, stage, lane, and words from fixed lists. A batch, a job, an item or an error's text is never a label.
Labels are limited here, whatever a message's headers say. `docs/how-to/runbook.md` says what each metric tells an
operator.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from messages.jobs import LANES, SHORT_PROMPT_TOKENS, STAGES
from messages.lifecycle import Event, Step
from messages.workers import WorkerStage

# Buckets in seconds. A chat answer takes a tenth of a second, and the last job of a class waits almost an hour.
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
# Buckets in seconds per token: from 1,000 tokens per second down to one token every two seconds.
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.5, 1, 2)

MAX_MODELS = 64  # maximum number of label values; jobs of further models are counted under OTHER_LABEL
OTHER_LABEL = "other"
QUESTIONS = ("code", "feedback", OTHER_LABEL)
REASONS = ("home_busy", "unserved")  # reasons why a worker steals a job
NEVER_S = 1e9  # in an event about a steal, this value means that no other worker would have done the job
STATES = ("succeeded", "failed", "expired")

Facts = Mapping[str, Any]


class Metrics:
    """An observer that keeps the metrics of one process in `registry`. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock  # seconds since the epoch
        self._models: set[str] = set()
        self._taken_up_to: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()
        # The series are cached, because looking one up takes longer than counting. There are only a few of them.
        self._at = lru_cache(maxsize=None)(lambda metric, *labels: metric.labels(*labels))
        self._make_counters()
        self._make_histograms()
        self._handlers: dict[Step, Callable[[Event, str], None]] = {
            Step.PREFILL_STARTED: self._on_prefill_started,
            Step.KV_STORED: self._on_kv_stored,
            Step.STOLEN: self._on_stolen,
            Step.DECODE_STARTED: self._on_decode_started,
            Step.KV_CHECKED: self._on_kv_checked,
            Step.FIRST_TOKEN: lambda event, model: self._at(self._ttft, model, _lane(event)).observe(
                _number(event.facts, "ttft_s")
            ),
            Step.ANSWERED: self._on_answered,
            Step.REPLIED: self._on_ended,
            Step.FAILED: self._on_failed,
            Step.EXPIRED: self._on_ended,
            Step.RETRIED: lambda event, model: self._retries.labels(model, _stage(event)).inc(),
            Step.REDELIVERED: lambda event, model: self._redeliveries.labels(model, _stage(event)).inc(),
            Step.ISOLATED: lambda event, model: self._suspects.labels(model, _stage(event)).inc(),
            Step.KV_GONE: lambda event, model: self._kv_gone.labels(model).inc(),
        }

    def __call__(self, event: Event) -> None:
        """Count one event. Steps without a metric are ignored."""
        handler = self._handlers.get(event.step)
        if handler:
            handler(event, self._model(event.model))

    def prepare(self, model: str, stage: WorkerStage) -> None:
        """Start this model's series at zero. Otherwise the rate of a series would miss its first event."""
        model = self._model(model)
        for lane in LANES:
            self._queue_wait.labels(model, stage, lane)
        for counter in (self._retries, self._redeliveries, self._suspects, self._dead_letters):
            counter.labels(model, stage)
        for state in STATES:
            self._jobs.labels(model, stage, state)
        if stage == "decode":
            return self._prepare_decode(model)
        for source in ("computed", "stored"):
            self._prefill_tokens.labels(model, source)
        for metric in (self._prefill_seconds, self._put_seconds, self._put_bytes):
            metric.labels(model)

    def _prepare_decode(self, model: str) -> None:
        values_by_metric: tuple[tuple[Counter | Histogram, Sequence[str]], ...] = (
            (self._prompt_tokens, ("transferred", "evaluated")),
            (self._kv_transfers, ("verified", "none", "short")),
            (self._kv_check_seconds, ("agrees", "differs")),
            (self._answers, QUESTIONS),
            (self._ttft, LANES),
            (self._total, LANES),
        )
        for metric, values in values_by_metric:
            for value in values:
                metric.labels(model, value)
        metrics = (self._tpot, self._decode_seconds, self._decode_tokens, self._get_seconds, self._get_bytes)
        for metric in (*metrics, self._kv_gone):
            metric.labels(model)

    def prepare_steals(self, models: Iterable[str]) -> None:
        """Start the series at zero for jobs that may be stolen from other models' queues."""
        for model in map(self._model, models):
            self._steal_saved.labels(model)
            for reason in REASONS:
                self._steals.labels(model, reason)

    def _make_counters(self) -> None:
        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(name, description, labels, registry=self.registry)

        self._jobs = counter("kvasir_jobs", "Runs that ended here, by how they ended.", "model", "stage", "state")
        self._answers = counter("kvasir_answers", "Answers by question, to count submissions.", "model", "question")
        self._prefill_tokens = counter(
            "kvasir_prefill_tokens", "Prompt tokens that prefill computed, or found stored.", "model", "source"
        )
        self._put_bytes = counter("kvasir_kv_put_bytes", "KV bytes written to the store.", "model")
        self._get_bytes = counter("kvasir_kv_get_bytes", "KV bytes read from the store or a worker's memory.", "model")
        self._prompt_tokens = counter(
            "kvasir_decode_prompt_tokens", "Prompt tokens at decode: transferred, or evaluated.", "model", "source"
        )
        self._kv_transfers = counter(
            "kvasir_kv_transfers",
            "Answers from a KV cache (kv), without (none), of short prompts (short).",
            "model",
            "outcome",
        )
        self._decode_tokens = counter("kvasir_decode_tokens", "Tokens generated.", "model")
        self._retries = counter("kvasir_retries", "Attempts that met a transient error.", "model", "stage")
        self._redeliveries = counter("kvasir_redeliveries", "Deliveries that had been somebody's.", "model", "stage")
        self._suspects = counter("kvasir_suspects", "Jobs set apart because they came back often.", "model", "stage")
        self._dead_letters = counter("kvasir_dead_letters", "Jobs given up.", "model", "stage")
        self._kv_gone = counter("kvasir_reprefills", "Jobs sent back to prefill: their KV was gone.", "model")
        self._steals = counter("kvasir_steals", "Jobs taken from another model's queue.", "model", "reason")
        self._steal_saved = counter("kvasir_steal_saved_seconds", "Waiting that steals saved, as predicted.", "model")

    def _make_histograms(self) -> None:
        def seconds(name: str, description: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"kvasir_{name}_seconds", description, labels, buckets=buckets, registry=self.registry)

        self._queue_wait = seconds("queue_wait", "Waiting before this stage began.", "model", "stage", "lane")
        self._prefill_seconds = seconds("prefill", "Prefill in the engine.", "model")
        self._put_seconds = seconds("kv_put", "From the last token computed until all KV was stored.", "model")
        self._get_seconds = seconds("kv_get", "KV cache from the store to the engine.", "model")
        self._kv_check_seconds = seconds(
            "kv_check", "Comparing a KV cache with one computed here; its count says how many.", "model", "outcome"
        )
        self._ttft = seconds("ttft", "From submission to the first token, queues included.", "model", "lane")
        self._tpot = seconds("tpot", "Per token after the first.", "model", buckets=TOKEN_SECONDS)
        self._decode_seconds = seconds("decode", "Decode in the engine.", "model")
        self._total = seconds("job", "From submission to the finished answer.", "model", "lane")
        self._newest_taken = Gauge(
            "kvasir_taken_submitted_timestamp_seconds",
            "When the newest job taken so far was submitted: what still waits in this queue is newer.",
            ("model", "stage", "lane"),
            registry=self.registry,
        )

    def _model(self, name: str) -> str:
        with self._lock:
            if name not in self._models and len(self._models) >= MAX_MODELS:
                return OTHER_LABEL
            self._models.add(name)
            return name

    def _on_prefill_started(self, event: Event, model: str) -> None:
        waited_s = _number(event.facts, "queue_s")
        self._note_taken(event, model, waited_s)
        self._at(self._queue_wait, model, "prefill", _lane(event)).observe(waited_s)

    def _on_kv_stored(self, event: Event, model: str) -> None:
        facts = event.facts
        self._at(self._prefill_seconds, model).observe(_number(facts, "prefill_s"))
        self._at(self._put_seconds, model).observe(_number(facts, "put_s"))
        self._at(self._put_bytes, model).inc(_number(facts, "put_bytes"))
        self._at(self._prefill_tokens, model, "computed").inc(_number(facts, "computed_tokens"))
        self._at(self._prefill_tokens, model, "stored").inc(_number(facts, "restored_tokens"))

    def _on_decode_started(self, event: Event, model: str) -> None:
        self._note_taken(event, model, _number(event.facts, "queue_s"))
        waited_s = _number(event.facts, "waited_s")
        self._at(self._queue_wait, model, "decode", _lane(event)).observe(waited_s)

    def _on_stolen(self, event: Event, model: str) -> None:
        """Count a steal. If the model has no own worker, there is no wait to compare with, so no saving is counted."""
        is_unserved = _number(event.facts, "end_there_s") >= NEVER_S
        self._at(self._steals, model, "unserved" if is_unserved else "home_busy").inc()
        self._at(self._steal_saved, model).inc(0.0 if is_unserved else _number(event.facts, "saving_s"))

    def _on_kv_checked(self, event: Event, model: str) -> None:
        outcome = "differs" if event.facts.get("differs") else "agrees"
        self._at(self._kv_check_seconds, model, outcome).observe(_number(event.facts, "seconds"))

    def _on_answered(self, event: Event, model: str) -> None:
        facts = event.facts
        tokens, transferred_tokens = _number(facts, "completion_tokens"), _number(facts, "transferred_tokens")
        self._at(self._decode_tokens, model).inc(tokens)
        self._at(self._decode_seconds, model).observe(_number(facts, "decode_s"))
        self._at(self._total, model, _lane(event)).observe(_number(facts, "total_s"))
        self._at(self._prompt_tokens, model, "transferred").inc(transferred_tokens)
        self._at(self._prompt_tokens, model, "evaluated").inc(_number(facts, "evaluated_tokens"))
        short = 0 < _number(facts, "prompt_tokens") <= SHORT_PROMPT_TOKENS
        self._at(self._kv_transfers, model, "verified" if transferred_tokens else "short" if short else "none").inc()
        if transferred_tokens:
            self._at(self._get_seconds, model).observe(_number(facts, "get_s"))
            self._at(self._get_bytes, model).inc(_number(facts, "get_bytes"))
        if tokens > 1:
            after_first_s = _number(facts, "total_s") - _number(facts, "ttft_s")
            self._at(self._tpot, model).observe(max(0.0, after_first_s) / (tokens - 1))

    def _on_ended(self, event: Event, model: str) -> None:
        state = _word(event.facts, "state", STATES)
        self._at(self._jobs, model, _stage(event), state).inc()
        if state == "succeeded":
            _, _, question = str(event.facts.get("item_id", "")).rpartition(".")
            self._at(self._answers, model, question if question in QUESTIONS else OTHER_LABEL).inc()

    def _on_failed(self, event: Event, model: str) -> None:
        self._on_ended(event, model)
        self._at(self._dead_letters, model, _stage(event)).inc()

    def _note_taken(self, event: Event, model: str, age_s: float) -> None:
        key = (model, _stage(event), _lane(event))
        with self._lock:
            newest = max(self._clock() - age_s, self._taken_up_to.get(key, 0.0))
            self._taken_up_to[key] = newest
        self._at(self._newest_taken, *key).set(newest)


def _number(facts: Facts, name: str) -> float:
    """Return a fact that is a valid number; 0 for anything else, since a bad figure must never stop an observer."""
    value = facts.get(name, 0.0)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1e15 else 0.0


def _word(facts: Facts, name: str, words: tuple[str, ...]) -> str:
    value = facts.get(name)
    return str(value) if value in words else OTHER_LABEL


def _stage(event: Event) -> str:
    return _word(event.facts, "stage", STAGES)


def _lane(event: Event) -> str:
    return _word(event.facts, "lane", LANES)

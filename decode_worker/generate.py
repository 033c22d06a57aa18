"""Turns a decode worker's jobs into texts: load the KV cache, check it, prove that it was reused, and stream.

The counter of evaluated tokens shows that a cache was used, and sketches compare engines once, on a fixed prompt.
Neither shows how a real prompt's cache affects its answer. So a decode worker sometimes also prefills a job itself, and
compares what the model expects as the answer's first token (`KVChecks`).
"""

import logging
import math
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from decode_worker.answers import Answers
from decode_worker.likelihoods import value_likelihoods
from decode_worker.stealing.models import LoadedModel
from engines.base import Answer, DecodeEngine, DecodesText, LoadedEngine
from engines.logprobs import logprob_gap
from engines.questions import tokenize_job
from engines.sketch import SketchAgreement
from infra.broker import topology
from infra.broker.base import Address, Broker, Delivery, Message
from infra.broker.envelope import Attempt
from infra.broker.failpoints import failpoint
from infra.broker.settle import prefill_helps
from infra.worker_loop import SlotPool
from kvstore.base import KVStore, Run
from kvstore.blocks import BlockRef, block_refs, snapshot_refs
from kvstore.cluster_state import BestEffortClusterState
from messages import codec
from messages.errors import KVTransferFailed, StoreUnavailable
from messages.jobs import (
    KV_CHECK_EVERY,
    Ask,
    DecodeJob,
    DecodeReport,
    JobResult,
    KVTransfer,
    PrefillJob,
    QuestionAnswer,
    StoredKV,
    TokenEvent,
)
from messages.kv import KVCache, KVLayout, Record, RecurrentState, is_finite
from messages.lifecycle import Event, Step

log = logging.getLogger(__name__)

# The worker pauses itself after this many failed fetches and probes in a row.
_FAILURES = 3
_PROBE = bytes(1 << 16)  # about the size of a small KV cache
_PROBE_EVERY_S = 30.0
# After a failed KV transfer, a prompt of at most this many tokens is prefilled here, because that is faster than
# sending the job back to prefill and fetching its KV cache again.
LOCAL_PREFILL_TOKENS = 256
# The maximum mean difference between two sets of log-probabilities, in nats. Rounding causes differences of up to 0.11
# (measured with SmolLM2 as Q4_1, float32 and bfloat16, between llama.cpp and MLX). The KV cache of another prompt
# causes differences of 0.6 to 3.4 (measured with tiny models with random weights, which predict no token with
# confidence).
MAX_GAP = 0.5


@dataclass(frozen=True, slots=True)
class FetchedCache:
    """A KV cache in memory, and how long it took to fetch."""

    cache: KVCache
    seconds: float


@dataclass(eq=False)
class DecodeAttempt(Attempt[DecodeJob]):
    """An attempt at a job in a decode worker."""

    # The model that decodes the job.
    loaded_model: LoadedModel = field(init=False)
    # The job's KV cache, if it was fetched before the job had a slot.
    ahead: Future[FetchedCache | None] | None = None
    began: float = 0.0  # monotonic clock
    queue_s: float = 0.0  # seconds from submission until the job got a slot
    before_s: float = 0.0  # seconds from submission until the first answer began
    is_rounded: bool = False  # whether the prefill and decode engines differ in dtype or weight format
    result: JobResult = field(init=False)
    body: bytes = b""  # the encoded result; b"" while the job still needs its slot

    @property
    def key(self) -> Run:
        """The job id and run, which identify claims and results."""
        return self.job.job.job_id, self.job.job.run


class RunningJobs:
    """The attempts that run now.

    A redelivery of a running job is adopted by its attempt instead of being decoded twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempts: dict[Run, DecodeAttempt] = {}

    def start(self, attempt: DecodeAttempt) -> bool:
        """Register an attempt.

        Returns False if its job already runs; the running attempt then adopts the deliveries.
        """
        with self._lock:
            running_attempt = self._attempts.get(attempt.key)
            if running_attempt:
                running_attempt.deliveries.extend(attempt.deliveries)
                return False
            attempt.began = time.monotonic()
            self._attempts[attempt.key] = attempt
            return True

    def end(self, attempt: DecodeAttempt) -> None:
        """Remove an attempt.

        If it was settled, deliveries that it adopted since then are acked; if not, all are left to settle. Does nothing
        to other attempts: if this one has ended before, its job may have come back and run in another one.
        """
        with self._lock:
            if self._attempts.get(attempt.key) is attempt:
                del self._attempts[attempt.key]
            late = list(attempt.deliveries) if attempt.is_outcome_confirmed else []
        for delivery in late:
            delivery.ack()

    def snapshot(self) -> list[DecodeAttempt]:
        """Return the attempts that run now."""
        with self._lock:
            return list(self._attempts.values())

    def next_end_s(self, expected_s: Callable[[DecodeJob], float]) -> float:
        """Return the seconds until a slot is expected to free; 0 if that is overdue, infinite if nothing runs.

        `expected_s` returns how long a job is expected to take.
        """
        ends = [attempt.began + expected_s(attempt.job) for attempt in self.snapshot() if not attempt.body]
        return max(0.0, min(ends) - time.monotonic()) if ends else math.inf

    def has_foreign(self, model: str) -> bool:
        """Whether a job of another model runs."""
        return any(attempt.job.job.model != model for attempt in self.snapshot())


class Generator:
    """Generates the answers of one decode worker."""

    def __init__(
        self,
        kv: KVStore,
        broker: Broker,
        cluster_state: BestEffortClusterState,
        slots: SlotPool,
        worker_id: str,
        observe: Callable[[Event], None],
        kv_check_every: int = KV_CHECK_EVERY,
    ) -> None:
        self._kv = kv
        self._broker = broker
        self._cluster_state = cluster_state
        self._slots = slots
        self._worker_id = worker_id
        self._observe = observe
        self.checks = KVChecks(kv_check_every)
        self._failed_fetches = 0  # number of failed fetches and probes since the last success
        self._next_probe = 0.0  # monotonic clock

    def result(self, attempt: DecodeAttempt) -> JobResult:
        """Decode a job from its KV cache. If the cache can't be used, the engine computes the prompt.

        Raises the engine's errors, and KVTransferFailed if the job should be prefilled again.
        """
        job = attempt.job
        attempt.queue_s = job.job.waited_s(self._cluster_state.now())
        prefill_report = job.prefill
        waited_s = max(0.0, attempt.queue_s - prefill_report.queue_s - prefill_report.prefill_s - prefill_report.put_s)
        self._observe(attempt.envelope.event(Step.DECODE_STARTED, queue_s=attempt.queue_s, waited_s=waited_s))
        try:
            return self._generate(attempt, *self.load_kv(attempt))
        except KVTransferFailed as error:
            log.warning("job %s: KV transfer failed: %s", job.job.job_id, error)
            self._drop_damaged(job)
            if self._better_prefilled_again(attempt):
                raise
            return self._generate(attempt, None, str(error))

    def load_kv(self, attempt: DecodeAttempt) -> tuple[FetchedCache | None, str]:
        """Return the job's KV cache, or None and the reason, which is "" if it never had one.

        Raises KVTransferFailed.
        """
        job, stored_kv, loaded_model = attempt.job, attempt.job.kv, attempt.loaded_model
        if stored_kv is None or loaded_model.why_no_kv:
            return None, loaded_model.why_no_kv or job.why_no_kv
        sketch_agreement, producer = agreement(stored_kv, loaded_model), self.checks.producer(job)
        attempt.is_rounded = sketch_agreement.formats_differ
        if reason := sketch_agreement.problem or producer.why_ended:
            return None, reason
        try:
            fetched_cache = (attempt.ahead and attempt.ahead.result()) or fetch(self._kv, job, stored_kv)
        except StoreUnavailable as error:
            self._failed_fetches += 1
            return None, f"the store is away: {error}"
        self._failed_fetches = 0
        failpoint("decode.loaded", job.job.job_id)
        if self.checks.is_due(job):
            seconds = self.checks.check(job, fetched_cache.cache, loaded_model.engine, attempt.stop)
            differs = bool(producer.why_ended)
            self._observe(attempt.envelope.event(Step.KV_CHECKED, seconds=seconds, differs=differs))
            if differs:
                return None, producer.why_ended
        return fetched_cache, ""

    def why_cut_off(self) -> str:
        """Return why other workers, which can fetch KV caches, should take the jobs, as a sentence.

        Returns "" if this worker can fetch them too, or if no worker can, because the store is away.
        """
        return (
            f"the store answers, but {_FAILURES} KV caches in a row did not come from it"
            if self._failed_fetches >= _FAILURES and self._cluster_state.answers
            else ""
        )

    def probe_store(self, model: str) -> None:
        """Test whether a value as large as a small KV cache goes there and comes back: every 30 s, and at every call
        after a failure.

        Without another worker for `model`, this worker goes on even if the test fails. It is better to decode without
        KV caches than not at all.
        """
        if self._failed_fetches or (time.monotonic() >= self._next_probe and self._cluster_state.answers):
            # Each probe has a new name, because `put_sketch` does not send a value whose name is already in the
            # store.
            name = f"probe-{self._worker_id}-{time.monotonic_ns()}"
            self._cluster_state.put_sketch(name, _PROBE, ttl_s=60.0)
            comes_back = self._cluster_state.get_sketch(name) == _PROBE
            # If the list of registrations is too large for the connection, an empty list comes back, and not even this
            # worker is in it.
            registrations = [] if comes_back else self._cluster_state.registrations()
            is_alone = bool(registrations) and not any(
                (other.role, other.model, other.off) == ("decode", model, "") and other.worker_id != self._worker_id
                for other in registrations
            )
            if comes_back or is_alone:
                self._failed_fetches, self._next_probe = 0, time.monotonic() + _PROBE_EVERY_S
            else:
                self._failed_fetches += 1

    def _generate(self, attempt: DecodeAttempt, fetched_cache: FetchedCache | None, why_none: str) -> JobResult:
        """Decode all answers that the job asks for, from the same cache. Only the first is streamed.

        Without a cache the prompts are computed here, and `why_none` goes into the result. A job that was not tokenized
        by a prefill worker is tokenized here.
        """
        job = attempt.job.job if attempt.job.job.tokens else tokenize_job(attempt.loaded_model.engine, attempt.job.job)
        asks, cache = job.asks(), fetched_cache.cache if fetched_cache else None
        attempt.before_s = job.waited_s(self._cluster_state.now())
        if asks[1:] or job.questions:
            answers = self._answer_all(attempt, asks, cache)
        else:
            answers = [self._answer(attempt, asks[0], cache)]
        first, more_texts = answers[0], tuple([answer.text for answer in answers[1:]])
        answer_fields: dict[str, Any] = {
            "text": first.text,
            "finish_reason": first.finish_reason,
            "more_texts": more_texts,
        }
        return JobResult(
            job.job_id,
            job.run,
            job.batch_id,
            job.item_id,
            job.model,
            "succeeded",
            attempts=attempt.envelope.attempts + 1,
            prefill=attempt.job.prefill,
            decode=self._report(attempt, asks, answers, fetched_cache, why_none),
            **(
                {"answers": tuple([_question_answer(answer) for answer in answers])} if job.questions else answer_fields
            ),
        )

    def _answer_all(self, attempt: DecodeAttempt, asks: list[Ask], cache: KVCache | None) -> list[Answer]:
        """Return all answers. They are decoded in this slot and in idle ones, except those noted before a crash."""
        job, engine = attempt.job.job, attempt.loaded_model.engine

        def give(number: int) -> Answer:
            ask = asks[number]
            answer = self._answer(attempt, ask, cache, is_first=number == 0)
            # Likelihoods are computed only for the first answer to each question.
            if not job.questions or (number and ask.prompt is asks[number - 1].prompt):
                return answer
            likelihoods = value_likelihoods(engine, ask, cache, answer.text, answer.tokens, attempt.stop)
            return replace(answer, likelihoods=likelihoods)

        answers = Answers(job, len(asks), give, self._slots, self._cluster_state)
        with engine.pin_cache(asks[0].tokens, cache) if cache else nullcontext():
            return answers.collect()

    def _answer(self, attempt: DecodeAttempt, ask: Ask, cache: KVCache | None, is_first: bool = True) -> Answer:
        """Return the engine's answer. The job's first answer is streamed if a client asked for that."""
        engine, job = attempt.loaded_model.engine, attempt.job.job
        stream = _Stream(self._broker, job, attempt.envelope.version) if job.stream_to and is_first else None
        on_text = stream.send if stream else None
        # `hasattr` makes the same check as `isinstance` with a protocol, but is faster.
        if hasattr(engine, "decode_text"):
            answer = cast(DecodesText, engine).decode_text(ask.prompt, ask.sampling, on_text, attempt.stop)
        else:
            answer = engine.decode(ask.tokens, cache, ask.sampling, on_text, attempt.stop)
        if stream:
            stream.send("", last=True)
        if is_first:
            self._observe(attempt.envelope.event(Step.FIRST_TOKEN, ttft_s=attempt.before_s + answer.first_token_s))
        return answer

    def _report(
        self,
        attempt: DecodeAttempt,
        asks: list[Ask],
        answers: list[Answer],
        fetched_cache: FetchedCache | None,
        why_none: str,
    ) -> DecodeReport:
        """Return the report, with the proof that the cache was reused.

        After a KV transfer, every answer must have evaluated exactly the tokens of its prompt that were not
        transferred. If not, the text is still right, but a KV transfer that saved nothing must not be reported as one.
        """
        transferred_tokens = fetched_cache.cache.num_tokens if fetched_cache else 0
        evaluated_tokens = max(answer.evaluated_tokens for answer in answers)
        for ask, answer in zip(asks, answers, strict=True) if transferred_tokens else ():
            num_evaluated, num_left = answer.evaluated_tokens, len(ask.tokens) - transferred_tokens
            if num_evaluated != num_left:
                why_none = (
                    why_none or f"the engine evaluated {num_evaluated:,} prompt tokens, but only {num_left:,} were left"
                )
        transfer: KVTransfer = "verified-rounded" if attempt.is_rounded else "verified"
        return DecodeReport(
            worker_id=self._worker_id,
            engine=attempt.loaded_model.engine.info.engine,
            kv_transfer="none" if why_none or not transferred_tokens else transfer,
            why_none=why_none,
            prompt_tokens=max(len(ask.tokens) for ask in asks) or evaluated_tokens,
            transferred_tokens=0 if why_none else transferred_tokens,
            evaluated_tokens=evaluated_tokens,
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            queue_s=attempt.queue_s,
            get_s=fetched_cache.seconds if fetched_cache else 0.0,
            ttft_s=attempt.before_s + answers[0].first_token_s,
            decode_s=sum(answer.seconds for answer in answers),
            total_s=attempt.job.job.waited_s(self._cluster_state.now()),
        )

    def _better_prefilled_again(self, attempt: DecodeAttempt) -> bool:
        envelope = attempt.envelope
        if not prefill_helps(envelope) or len(attempt.job.job.tokens) <= LOCAL_PREFILL_TOKENS:
            return False
        return any(
            registration.role == "prefill" and registration.model == envelope.model
            for registration in self._cluster_state.registrations()
        )

    def _drop_damaged(self, job: DecodeJob) -> None:
        """Delete those of the job's records that can't be used.

        Prefill stores only missing records and never overwrites one. A damaged shared block that stayed would therefore
        spoil every KV transfer of the class.
        """
        stored_kv = job.kv
        if stored_kv is None:
            return
        refs = stored_refs(job, stored_kv)
        with suppress(StoreUnavailable):
            damaged_refs = [ref for ref in refs if not self._is_readable(stored_kv, ref)]
            self._kv.delete([*damaged_refs, *snapshot_refs(stored_kv.layout, refs[-1])])

    def _is_readable(self, stored_kv: StoredKV, ref: BlockRef) -> bool:
        try:
            check_finite(self._kv.get(stored_kv.fingerprint, stored_kv.layout, [ref])[0], stored_kv.layout)
        except KVTransferFailed:
            return False
        return True


def _question_answer(answer: Answer) -> QuestionAnswer:
    return QuestionAnswer(answer.text, answer.finish_reason, "succeeded", answer.evaluated_tokens, answer.likelihoods)


class _Stream:
    """Sends TokenEvents to the client that asked for them. They may get lost, and the result never depends on them."""

    def __init__(self, broker: Broker, job: PrefillJob, version: int) -> None:
        self._broker = broker
        self._job = job
        self._version = version
        self._delivery = secrets.token_hex(8)
        self._index = 0

    def send(self, text: str, last: bool = False) -> None:
        """Send one piece. `last` says that no more pieces follow."""
        event = TokenEvent(self._job.job_id, self._job.run, self._delivery, self._index, text, last)
        self._index += 1
        message = Message(codec.encode(event, self._version), self._job.job_id, self._job.batch_id, persistent=False)
        self._broker.publish_lossy(Address(topology.STREAM, self._job.stream_to), message)


def stored_refs(job: DecodeJob, kv: StoredKV) -> list[BlockRef]:
    """Return references to the blocks of the job's KV cache."""
    prefill_job = job.job
    return block_refs(
        kv.fingerprint,
        kv.layout,
        prefill_job.tokens,
        kv.num_tokens,
        kv.shared_tokens,
        prefill_job.job_id,
        kv.sketch,
        prefill_job.tag,
    )


def agreement(stored_kv: StoredKV, loaded_engine: LoadedEngine[DecodeEngine]) -> SketchAgreement:
    """Return whether an engine can use this KV cache.

    It can if its producer was measured to compute the same values as the engine would.
    """
    info = loaded_engine.engine.info
    if not info.capabilities.imports_kv or info.layout is None:
        return SketchAgreement(f"engine {info.engine} can't load KV caches")
    if stored_kv.fingerprint != info.fingerprint:
        return SketchAgreement(
            f"the KV cache has fingerprint {stored_kv.fingerprint:.12}, this worker's model {info.fingerprint:.12}"
        )
    if reason := stored_kv.layout.why_unsupported:
        return SketchAgreement(reason)
    return loaded_engine.sketches.agreement(stored_kv.sketch)


def fetch(kv: KVStore, job: DecodeJob, stored_kv: StoredKV) -> FetchedCache:
    """Load a job's KV cache. Raises KVTransferFailed, StoreUnavailable."""
    start = time.monotonic()
    cache = kv.get_cache(stored_kv.fingerprint, stored_kv.layout, stored_refs(job, stored_kv))
    for record in cache.records:
        check_finite(record, stored_kv.layout)
    return FetchedCache(cache, time.monotonic() - start)


def check_finite(record: Record, layout: KVLayout) -> None:
    """Raise KVTransferFailed if a record contains inf or nan: every answer from it would be nonsense."""
    if not is_finite(record.data, "f32" if isinstance(record, RecurrentState) else layout.dtype):
        raise KVTransferFailed("the stored KV cache contains inf or nan")


def fetch_ahead(kv: KVStore, delivery: Delivery, loaded_engine: LoadedEngine[DecodeEngine]) -> FetchedCache | None:
    """Return the KV cache of a delivery that has no slot yet; None if the job has none that this engine can use.

    Raises what `fetch` raises, and InvalidMessage.
    """
    job = codec.decode(delivery.message.body, DecodeJob)
    if job.kv is None or agreement(job.kv, loaded_engine).problem:
        return None
    return fetch(kv, job, job.kv)


@dataclass
class Producer:
    """What is known of the KV caches of one producer, for one model."""

    jobs_since_check: int = 0
    has_passed: bool = False
    why_ended: str = ""  # why this worker no longer uses the producer's KV caches; "" if it uses them


class KVChecks:
    """The KV checks of one decode worker. Its methods may be called from any thread.

    `check_every`: the first job of each producer is checked, and then one in this many; 0: none is. Until one has
    passed, every job is checked, since jobs that arrive together must not be decoded before the first verdict.
    """

    def __init__(self, check_every: int = KV_CHECK_EVERY) -> None:
        self._check_every = check_every
        self._producers: dict[tuple[str, ...], Producer] = defaultdict(Producer)
        self._lock = threading.RLock()

    def is_due(self, job: DecodeJob) -> bool:
        """Whether this job's KV cache must be checked before it is used. This counts the job."""
        with self._lock:
            producer = self.producer(job)
            producer.jobs_since_check += 1
            return bool(self._check_every) and (
                not producer.has_passed or producer.jobs_since_check >= self._check_every
            )

    def producer(self, job: DecodeJob) -> Producer:
        """Return what is known of the producer of this job's KV cache."""
        assert job.kv is not None
        with self._lock:
            return self._producers[job.job.model, job.prefill.engine, job.kv.fingerprint, job.kv.sketch]

    def endings(self) -> dict[str, str]:
        """Return a sentence for each producer whose KV caches are no longer used, by the name of its sketch."""
        with self._lock:
            return {name[-1]: producer.why_ended for name, producer in self._producers.items() if producer.why_ended}

    def check(self, job: DecodeJob, cache: KVCache, engine: DecodeEngine, stop: threading.Event) -> float:
        """Prefill the job here too, and record the verdict on its producer. Returns the seconds it took.

        Raises what `engine.top_logprobs` raises.
        """
        start = time.monotonic()
        tokens = job.job.asks()[0].tokens
        gap = logprob_gap(engine.top_logprobs(tokens, None, stop), engine.top_logprobs(tokens, cache, stop))
        with self._lock:
            producer = self.producer(job)
            producer.jobs_since_check, producer.has_passed = 0, gap <= MAX_GAP
            if gap > MAX_GAP:
                producer.why_ended = (
                    f"with a KV cache from {job.prefill.engine or 'another engine'} the model expects other tokens "
                    f"than with one from {engine.info.engine}: {gap:.2f} nats apart on average, more than "
                    f"the {MAX_GAP} that rounding may cause"
                )
                log.error("job %s: %s; its KV caches are no longer used", job.job.job_id, producer.why_ended)
        return time.monotonic() - start

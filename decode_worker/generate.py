"""From a decode job to its text: load the KV cache, prove its reuse, stream the tokens."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, cast

from decode_worker.answers import Answers, Given
from decode_worker.attempt import DecodeAttempt
from decode_worker.fetching import Fetched, agreement, check_finite, fetch, stored_refs
from decode_worker.kv_check import KVChecks
from decode_worker.likelihoods import value_likelihoods
from engines.base import Answer, DecodesText
from engines.questions import tokenized
from infra.broker import topology
from infra.broker.base import Address, Broker, Message
from infra.broker.failpoints import failpoint
from infra.broker.slots import Slots
from kvstore.base import ClusterState, KVStore
from kvstore.blocks import BlockRef, snapshot_refs
from messages import codec
from messages.errors import KVTransferFailed, StoreUnavailable
from messages.jobs import Ask, DecodeReport, JobResult, PrefillJob, QuestionAnswer, StoredKV, TokenEvent
from messages.kv import KVCache
from messages.lifecycle import Event, Step


class Generation:
    """One decode of one job. Raises what the engine raises, and KVTransferFailed if the KV cache is of no use."""

    def __init__(
        self,
        attempt: DecodeAttempt,
        kv: KVStore,
        broker: Broker,
        cluster_state: ClusterState,
        checks: KVChecks,
        slots: Slots,
        worker_id: str,
        observe: Callable[[Event], None],
    ) -> None:
        self._attempt = attempt
        self._job = attempt.job
        self._engine = attempt.loaded.engine
        self._rounded = False
        self._kv = kv
        self._broker = broker
        self._cluster_state = cluster_state
        self._checks = checks
        self._slots = slots
        self._worker_id = worker_id
        self._observe = observe
        self.queue_s = self._since_submission()

    def from_kv(self) -> JobResult:
        """Decode from the stored KV cache; without one, or without a store, the engine does the prompt."""
        stored = self._job.kv
        why = self._attempt.loaded.why_no_kv or (self._job.why_no_kv if stored is None else "")
        if stored and not why:
            found = agreement(stored, self._attempt.loaded)
            self._rounded = found.rounded
            why = found.why or self._checks.why_ended(self._job)
        if stored is None or why:
            return self.generate(None, why)
        try:
            ahead = self._attempt.ahead
            fetched = (ahead and ahead.result()) or fetch(self._kv, self._job, stored)
        except StoreUnavailable as error:
            return self.generate(None, f"the store is away: {error}")
        failpoint("decode.loaded", self._job.job.job_id)
        if self._checks.due(self._job):
            why = self._check(fetched.cache)
        return self.generate(None if why else fetched, why)

    def _check(self, cache: KVCache) -> str:
        """Compare a KV cache with one of our own; why it must not be used, "": it may."""
        seconds = self._checks.check(self._job, cache, self._engine, self._attempt.stop)
        why = self._checks.why_ended(self._job)
        self._observe(self._attempt.envelope.event(Step.KV_CHECKED, seconds=seconds, differs=bool(why)))
        return why

    def generate(self, fetched: Fetched | None, why_none: str = "") -> JobResult:
        """All answers that the job asks for, from the same cache; only the first is streamed.

        Without a cache the prompts are done here, and `why_none` goes into the result. A job that no prefill worker
        tokenized is tokenized here.
        """
        job = self._job.job if self._job.job.tokens else tokenized(self._engine, self._job.job)
        asks, cache = job.asks(), fetched.cache if fetched else None
        before_s = self._since_submission()
        if asks[1:] or job.questions:
            given = self._several(asks, cache, before_s)
        else:
            given = [Given(self._first(asks[0], cache, before_s))]
        answers = [one.answer for one in given]
        first, more = answers[0], tuple([answer.text for answer in answers[1:]])
        said: dict[str, Any] = {"text": first.text, "finish_reason": first.finish_reason, "more_texts": more}
        return JobResult(
            job.job_id,
            job.run,
            job.batch_id,
            job.item_id,
            job.model,
            "succeeded",
            attempts=self._attempt.envelope.attempts + 1,
            prefill=self._job.prefill,
            decode=self._report(asks, answers, fetched, before_s, why_none),
            **({"answers": tuple([_counted(one) for one in given])} if job.questions else said),
        )

    def drop_damaged(self) -> None:
        """Delete those of the job's records that can't be used.

        Prefill stores what is missing and nothing over what is there: left in place, a damaged shared block would
        spoil every KV transfer of the class.
        """
        stored = self._job.kv
        if stored is None:
            return
        refs = stored_refs(self._job, stored)
        with suppress(StoreUnavailable):
            damaged = [ref for ref in refs if not self._readable(stored, ref)]
            self._kv.delete([*damaged, *snapshot_refs(stored.layout, refs[-1])])

    def _readable(self, stored: StoredKV, ref: BlockRef) -> bool:
        try:
            check_finite(self._kv.get(stored.fingerprint, stored.layout, [ref])[0], stored.layout)
        except KVTransferFailed:
            return False
        return True

    def _several(self, asks: Sequence[Ask], cache: KVCache | None, before_s: float) -> list[Given]:
        """All of them, those left by a crash, in this slot and in those that idle."""
        job, stop = self._job.job, self._attempt.stop

        def give(number: int) -> Given:
            ask = asks[number]
            answer = self._answer(ask, cache) if number else self._first(ask, cache, before_s)
            if not job.questions or (number and ask.prompt is asks[number - 1].prompt):  # not the first to its question
                return Given(answer)
            return Given(answer, value_likelihoods(self._engine, ask, cache, answer.text, answer.tokens, stop))

        answers = Answers(job, len(asks), give, self._slots, self._cluster_state)
        with self._engine.imported(asks[0].tokens, cache) if cache else nullcontext():
            return answers.all()

    def _first(self, ask: Ask, cache: KVCache | None, before_s: float) -> Answer:
        """The job's first answer, streamed to whoever reads along."""
        job = self._job.job
        stream = _Stream(self._broker, job) if job.stream_to else None
        answer = self._answer(ask, cache, stream.send if stream else None)
        if stream:
            stream.send("", last=True)
        self._observe(self._attempt.envelope.event(Step.FIRST_TOKEN, ttft_s=before_s + answer.first_token_s))
        return answer

    def _answer(self, ask: Ask, cache: KVCache | None, on_text: Callable[[str], None] | None = None) -> Answer:
        """The engine's answer."""
        if hasattr(self._engine, "decode_text"):  # isinstance would ask just this, and not quickly
            whole = cast(DecodesText, self._engine)
            return whole.decode_text(ask.prompt, ask.sampling, on_text, self._attempt.stop)
        return self._engine.decode(ask.tokens, cache, ask.sampling, on_text, self._attempt.stop)

    def _report(
        self, asks: Sequence[Ask], answers: Sequence[Answer], fetched: Fetched | None, before_s: float, why_none: str
    ) -> DecodeReport:
        """With the proof: after a KV transfer every answer must have evaluated just the tokens that were left of its
        prompt.

        The text is right all the same; but a KV transfer that saved nothing must not be reported as one.
        """
        transferred = fetched.cache.num_tokens if fetched else 0
        evaluated = max(answer.evaluated_tokens for answer in answers)
        for ask, answer in zip(asks, answers, strict=True) if transferred else ():
            done, left = answer.evaluated_tokens, len(ask.tokens) - transferred
            if done != left:
                why_none = why_none or f"the engine evaluated {done:,} prompt tokens where {left:,} were left"
        return DecodeReport(
            worker_id=self._worker_id,
            engine=self._engine.info.engine,
            kv_transfer="none" if why_none or not transferred else "verified-rounded" if self._rounded else "verified",
            why_none=why_none,
            prompt_tokens=max(len(ask.tokens) for ask in asks) or evaluated,
            transferred_tokens=0 if why_none else transferred,
            evaluated_tokens=evaluated,
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            queue_s=self.queue_s,
            get_s=fetched.seconds if fetched else 0.0,
            ttft_s=before_s + answers[0].first_token_s,
            decode_s=sum(answer.seconds for answer in answers),
            total_s=self._since_submission(),
        )

    def _since_submission(self) -> float:
        return self._job.job.waited_s(self._cluster_state.now())


def _counted(given: Given) -> QuestionAnswer:
    one = given.answer
    return QuestionAnswer(one.text, one.finish_reason, "succeeded", one.evaluated_tokens, given.likelihoods)


class _Stream:
    """TokenEvents to whoever asked for them. Lossy: the result never depends on it."""

    def __init__(self, broker: Broker, job: PrefillJob) -> None:
        self._broker = broker
        self._job = job
        self._delivery = secrets.token_hex(8)
        self._index = 0

    def send(self, text: str, last: bool = False) -> None:
        """Send one piece; the `last` says that no more come."""
        event = TokenEvent(self._job.job_id, self._job.run, self._delivery, self._index, text, last)
        self._index += 1
        message = Message(codec.encode(event), self._job.job_id, self._job.batch_id, persistent=False)
        self._broker.publish_lossy(Address(topology.STREAM, self._job.stream_to), message)

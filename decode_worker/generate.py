"""From a decode job to its text: load the KV cache, prove its reuse, stream the tokens."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from decode_worker.fetching import AheadFetch, fetch, stored_refs, why_foreign
from engines.base import Answer, DecodeEngine, DecodesText
from infra import topology
from infra.broker import Address, Broker, Message
from infra.fault_points import reached
from kvstore.base import Board, KVStore
from kvstore.blocks import BlockRef, window_ref
from messages import codec
from messages.errors import HandOverFailed, StoreUnavailable
from messages.jobs import DecodeJob, DecodeReport, StoredKV, TokenEvent
from messages.kv import KVCache
from messages.lifecycle import Step


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer, and how it came about."""

    text: str
    finish_reason: str
    more_texts: tuple[str, ...]
    report: DecodeReport


class Generation:
    """One decode of one job. Raises what the engine raises, and HandOverFailed if the KV cache is of no use."""

    def __init__(
        self,
        engine: DecodeEngine,
        kv: KVStore,
        broker: Broker,
        board: Board,
        job: DecodeJob,
        stop: threading.Event,
        see: Callable[..., None],
        ahead: AheadFetch | None = None,
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._broker = broker
        self._board = board
        self._job = job
        self._stop = stop
        self._see = see
        self._ahead = ahead
        self.queue_s = self._since_submission()

    def from_kv(self) -> Generated:
        """Decode from the stored KV cache; without one, or without a store, the engine does the prompt."""
        stored = self._job.kv
        if stored is None:
            return self.without_kv(self._job.why_no_kv)
        why = why_foreign(stored, self._engine.info)
        if why:
            return self.without_kv(why)
        try:
            fetched = (self._ahead and self._ahead.result()) or fetch(self._kv, self._job, stored)
        except StoreUnavailable as error:
            return self.without_kv(f"the store is away: {error}")
        reached("decode.loaded", self._job.job.job_id)
        return self._generate(fetched.cache, fetched.seconds)

    def without_kv(self, why: str) -> Generated:
        """Decode with the prompt done here; `why` goes into the result."""
        return self._generate(None, 0.0, why)

    def drop_damaged(self) -> None:
        """Delete those of the job's records that can't be read.

        Prefill stores what is missing and nothing over what is there: left in place, a damaged shared block would
        spoil every hand-over of the class.
        """
        stored = self._job.kv
        if stored is None:
            return
        refs = stored_refs(self._job, stored)
        with suppress(StoreUnavailable):
            damaged = [ref for ref in refs if not self._readable(stored, ref)]
            if stored.layout.window_layers:
                damaged.append(window_ref(refs[-1]))
            self._kv.delete(damaged)

    def _readable(self, stored: StoredKV, ref: BlockRef) -> bool:
        try:
            self._kv.get(stored.fingerprint, stored.layout, [ref])
        except HandOverFailed:
            return False
        return True

    def _generate(self, cache: KVCache | None, get_s: float, why_none: str = "") -> Generated:
        """All answers that the job asks for, one after the other from the same cache; only the first is streamed."""
        stream = _Stream(self._broker, self._job)
        before_s = self._since_submission()
        first = self._answer(cache, 0, stream.piece if stream.wanted else None)
        stream.end()
        self._see(Step.FIRST_TOKEN, self._job, ttft_s=before_s + first.first_token_s)
        others = [self._answer(cache, number) for number in range(1, self._job.job.sampling.answers)]
        answers = [first, *others]
        why_none = why_none or self._why_not_reused(cache, answers)
        report = self._report(answers, cache.num_tokens if cache else 0, get_s, before_s, why_none)
        return Generated(first.text, first.finish_reason, tuple(answer.text for answer in others), report)

    def _why_not_reused(self, cache: KVCache | None, answers: Sequence[Answer]) -> str:
        """The proof: with a cache, every answer must have evaluated just the tokens that it does not cover.

        The text is right all the same; but a hand-over that saved nothing must not be reported as one.
        """
        if cache is None:
            return ""
        left = len(self._job.job.tokens) - cache.num_tokens
        most = max(answer.evaluated_tokens for answer in answers)
        return "" if most == left else f"the engine evaluated {most:,} prompt tokens where {left:,} were left"

    def _answer(self, cache: KVCache | None, number: int, on_text: Callable[[str], None] | None = None) -> Answer:
        """The engine's answer. A job that no prefill worker tokenized travels as text, and is tokenized here."""
        job = self._job.job
        sampling = job.sampling
        if number or sampling.answers > 1:
            sampling = replace(sampling, seed=(sampling.seed + number) % 2**32, answers=1)
        if _decodes_text(type(self._engine)):
            return cast(DecodesText, self._engine).decode_text(job.shared + job.own, sampling, on_text, self._stop)
        tokens = job.tokens or self._engine.tokenize(job.shared, job.own, job.submitted_at).ids
        return self._engine.decode(tokens, cache, sampling, on_text, self._stop)

    def _report(
        self, answers: Sequence[Answer], handed_over: int, get_s: float, before_s: float, why_none: str
    ) -> DecodeReport:
        evaluated = max(answer.evaluated_tokens for answer in answers)
        return DecodeReport(
            engine=self._engine.info.engine,
            hand_over="none" if why_none or not handed_over else "kv",
            why_none=why_none,
            prompt_tokens=len(self._job.job.tokens) or evaluated,
            handed_over_tokens=0 if why_none else handed_over,
            evaluated_tokens=evaluated,
            completion_tokens=sum(answer.completion_tokens for answer in answers),
            queue_s=self.queue_s,
            get_s=get_s,
            ttft_s=before_s + answers[0].first_token_s,
            decode_s=sum(answer.seconds for answer in answers),
            total_s=self._since_submission(),
        )

    def _since_submission(self) -> float:
        return self._job.job.waited_s(self._board.now())


@cache
def _decodes_text(kind: type) -> bool:
    """`isinstance` asks the same of each engine, with every job anew and not quickly."""
    return issubclass(kind, DecodesText)


class _Stream:
    """TokenEvents to whoever asked for them. Lossy: the result never depends on it."""

    def __init__(self, broker: Broker, job: DecodeJob) -> None:
        self._broker = broker
        self._job = job.job
        self.wanted = bool(self._job.stream_to)
        self._delivery = secrets.token_hex(8) if self.wanted else ""
        self._index = 0

    def piece(self, text: str) -> None:
        """Send one piece."""
        self._send(text, last=False)

    def end(self) -> None:
        """Say that no more pieces come."""
        if self.wanted:
            self._send("", last=True)

    def _send(self, text: str, last: bool) -> None:
        event = TokenEvent(self._job.job_id, self._job.run, self._delivery, self._index, text, last)
        self._index += 1
        message = Message(codec.encode(event), self._job.job_id, self._job.batch_id, persistent=False)
        self._broker.publish_lossy(Address(topology.STREAM, self._job.stream_to), message)

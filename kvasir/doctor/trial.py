"""`kvasir doctor --try`: sends made-up jobs through every live pair of workers, and says what each KV transfer did.

Jobs can't be addressed to a worker. So rounds of as many jobs as there are workers of the larger stage are sent, until
each pair has had one, or four times as many jobs as there are pairs have been sent.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from engines.registry import entries
from infra.broker import topology
from infra.config.next_command import next_command
from kvasir.doctor.findings import Finding, Level, error, warn
from messages.errors import BrokerUnavailable
from messages.jobs import JobResult, KVTransfer, PrefillJob, Sampling, user_prompt
from messages.workers import WorkerInfo, WorkerStage
from producers.client import Client
from producers.words import plural

PROMPT_TOKENS = 2000
ANSWER_TOKENS = 64
JOBS_PER_PAIR = 4
_LATE_S = 5.0  # after its deadline a job's result says that it has expired

_SUBJECTS = ("river", "ferry", "bridge", "market", "garden", "school", "library", "harbour")
_PLACES = ("in the north", "by the sea", "near the old town", "on the hill", "under the trees", "at the border")
_STATISTICS = ("total", "mean", "largest", "smallest", "median", "spread", "count", "first")


@dataclass(frozen=True, slots=True)
class Trial:
    """What one job showed of the pair that it met. A rate of 0 was not measured."""

    level: Level
    model: str
    prefill: str  # worker id
    prefill_device: str
    decode: str
    decode_device: str
    kv_transfer: KVTransfer
    found: str  # why there was no KV transfer, or what is wrong; "" if all is well
    prompt_tokens: int
    transferred_tokens: int
    evaluated_tokens: int  # of the prompt, by the decoder's own counter
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    kv_bytes: int
    put_bytes_per_s: float  # at least: saving, cutting, and being taken by the decoder are in it
    get_bytes_per_s: float
    total_s: float  # from submission to the finished answer
    todo: str = ""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Everything that was seen of one model."""

    trials: tuple[Trial, ...]
    findings: tuple[Finding, ...]  # pairs that no job met, and what kept jobs from running
    job_ids: tuple[str, ...] = ()  # that were sent

    @property
    def has_failed(self) -> bool:
        """Whether a KV transfer that should work did not, or a job failed."""
        levels = [trial.level for trial in self.trials] + [finding.level for finding in self.findings]
        return "error" in levels


def served_models(client: Client) -> list[str]:
    """The configured models that have live workers of both stages."""
    registrations = client.workers()
    return [m for m in client.models if _live(registrations, m, "prefill") and _live(registrations, m, "decode")]


def try_model(client: Client, model: str, wait_s: float, registrations_within_s: float) -> TrialResult:
    """Send jobs of the `now` lane until every live pair was met; `wait_s` bounds the wait for each round.

    Workers that have just been started may take `registrations_within_s` to register. Leaves nothing behind at the
    broker. Raises BrokerUnavailable, NoQueue.
    """
    registrations = _registrations(client, model, registrations_within_s)
    stages: tuple[WorkerStage, ...] = ("prefill", "decode")
    absent = [stage for stage in stages if not _live(registrations, model, stage)]
    off = [
        warn(
            model,
            f"{registration.worker_id} is left out: {registration.off}",
            next_command("resume", registration.worker_id),
        )
        for registration in registrations
        if registration.model == model and registration.off
    ]
    if absent:
        todo = " and ".join(next_command(f"{stage}-worker", "--model", model) for stage in absent)
        return TrialResult((), (*off, error(model, f"no {' and no '.join(absent)} worker takes jobs", f"start {todo}")))
    trial_result = _Rounds(client, model, registrations, wait_s).try_pairs()
    return replace(trial_result, findings=(*off, *trial_result.findings))


def judge(result: JobResult, registrations: Sequence[WorkerInfo]) -> Trial:
    """One job's result as a line. `registrations`: of the workers that were alive when it was sent."""
    by_id = {registration.worker_id: registration for registration in registrations}
    prefill, decode = by_id.get(result.prefill.worker_id), by_id.get(result.decode.worker_id)
    level, problem, todo = _verdict(result, prefill, decode)
    prefill_report, decode_report = result.prefill, result.decode
    # What was put is the job's suffix; a template's first tokens may have lain there already.
    size = (
        prefill_report.put_bytes * decode_report.transferred_tokens // prefill_report.computed_tokens
        if prefill_report.computed_tokens
        else 0
    )
    return Trial(
        level=level,
        model=result.model,
        prefill=prefill_report.worker_id,
        prefill_device=prefill.device if prefill else "",
        decode=decode_report.worker_id,
        decode_device=decode.device if decode else "",
        kv_transfer=decode_report.kv_transfer,
        found=problem,
        prompt_tokens=decode_report.prompt_tokens,
        transferred_tokens=decode_report.transferred_tokens,
        evaluated_tokens=decode_report.evaluated_tokens,
        prefill_tokens_per_s=_rate(prefill_report.computed_tokens, prefill_report.prefill_s),
        decode_tokens_per_s=_rate(decode_report.completion_tokens - 1, decode_report.total_s - decode_report.ttft_s),
        kv_bytes=size,
        put_bytes_per_s=_rate(prefill_report.put_bytes, _put_window_s(result)),
        get_bytes_per_s=_rate(size, decode_report.get_s),
        total_s=decode_report.total_s,
        todo=todo,
    )


def _verdict(result: JobResult, prefill: WorkerInfo | None, decode: WorkerInfo | None) -> tuple[Level, str, str]:
    """(level, what was found, what to do)."""
    decode_report = result.decode
    if result.error or result.state != "succeeded":
        reason = result.error.message if result.error else "nobody took it in time"
        return "error", f"the job {result.state}: {reason}", f"see {next_command('status')}, and the workers' logs"
    pending_tokens = decode_report.prompt_tokens - decode_report.transferred_tokens
    if decode_report.evaluated_tokens != pending_tokens:
        problem = (
            f"the decoder evaluated {decode_report.evaluated_tokens:,} tokens of the prompt, "
            f"and {pending_tokens:,} were left to it"
        )
        return "error", problem, "see the decode worker's log: its engine did not use what was transferred"
    if decode_report.kv_transfer != "none":
        return "ok", "", ""
    if _should_kv_transfer(result.model, prefill, decode):
        return (
            "error",
            f"no KV transfer: {decode_report.why_none}",
            "both workers proved it when they started: see their logs",
        )
    return "warn", f"no KV transfer: {decode_report.why_none}", f"{next_command('doctor')} says what would transfer KV"


def _should_kv_transfer(model: str, prefill: WorkerInfo | None, decode: WorkerInfo | None) -> bool:
    """By the registrations. Of a decode worker that took another model's job they tell nothing."""
    if prefill is None or decode is None or decode.model != model:
        return False
    return prefill.transfers_kv and decode.transfers_kv and prefill.fingerprint == decode.fingerprint != ""


def _put_window_s(result: JobResult) -> float:
    """Within which all KV went into the store: after computing, or from its beginning where the engine overlaps both.

    The report's `put_s` is what was left to put when the engine returned: dividing by it would flatter the link.
    """
    entry = entries().get(result.prefill.engine)
    overlaps = bool(entry and entry.capabilities.blocks_while_computing)
    since_taken_s = result.decode.queue_s - result.prefill.queue_s
    return since_taken_s if overlaps else since_taken_s - result.prefill.prefill_s


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if amount > 0 and seconds > 0 else 0.0


class _Rounds:
    """Rounds of jobs of one batch, until every pair was met."""

    def __init__(self, client: Client, model: str, registrations: Sequence[WorkerInfo], wait_s: float) -> None:
        self._client = client
        self._model = model
        self._registrations = registrations
        self._wait_s = wait_s
        self._prefills, self._decodes = (_live(registrations, model, stage) for stage in ("prefill", "decode"))
        pairs = product(self._prefills, self._decodes)
        self._unmet_pairs = {(prefill.worker_id, decode.worker_id) for prefill, decode in pairs}
        self._jobs_left = JOBS_PER_PAIR * len(self._unmet_pairs)
        self._trials: list[Trial] = []
        self._job_ids: list[str] = []

    def try_pairs(self) -> TrialResult:
        late: tuple[Finding, ...] = ()
        has_failed = False  # without having met a decode worker
        while self._unmet_pairs and self._jobs_left and not late and not has_failed:
            late = self._round(min(self._jobs_left, max(len(self._prefills), len(self._decodes))))
            has_failed = any(trial.level == "error" and not trial.decode for trial in self._trials)
        return TrialResult(tuple(self._trials), (*late, *self._not_met()), tuple(self._job_ids))

    def _round(self, size: int) -> tuple[Finding, ...]:
        """Send `size` jobs side by side; a finding if some were not answered in time."""
        batch = f"doctor-{secrets.token_hex(8)}"
        jobs = [self._job(batch, number) for number in range(size)]
        self._job_ids += [job.job_id for job in jobs]
        self._jobs_left -= size
        answer_count = 0
        try:
            self._client.submit(jobs)
            for result in self._client.gather(batch, [job.job_id for job in jobs], self._wait_s + _LATE_S):
                answer_count += 1
                self._note(judge(result, self._registrations))
        finally:
            if answer_count < size:
                self._leave(batch)
        if answer_count == size:
            return ()
        message = f"{size - answer_count} of {plural(size, 'job')} had no answer within {self._wait_s:.0f} s"
        return (error(self._model, message, f"{next_command('status')} says who is busy; --wait SECONDS waits longer"),)

    def _job(self, batch: str, number: int) -> PrefillJob:
        tokens = min(
            [PROMPT_TOKENS, *(registration.context // 2 for registration in (*self._prefills, *self._decodes))]
        )
        letters = next(
            (registration.chars_per_token for registration in self._prefills if registration.chars_per_token), 4.0
        )
        answer = Sampling(min(ANSWER_TOKENS, max(1, tokens // 2)), temperature=0.0)
        text = made_up_text(int(tokens * letters))
        deadline = self._client.cluster_state.now() + self._wait_s
        return self._client.new_job(
            batch, f"try-{number}", self._model, user_prompt("", text), answer, lane="now", deadline=deadline
        )

    def _note(self, trial: Trial) -> None:
        """A pair's first job is its line; a later one only if it went wrong, or met nobody that was expected."""
        pair = (trial.prefill, trial.decode)
        if trial.level == "error" or pair not in {(earlier.prefill, earlier.decode) for earlier in self._trials}:
            self._trials.append(trial)
        self._unmet_pairs.discard(pair)

    def _leave(self, batch: str) -> None:
        """Whoever still holds one of these jobs drops it, and no queue stays."""
        with suppress(BrokerUnavailable):
            self._client.cancel(batch)
            self._client.broker.delete_queue(topology.reply_queue(batch, self._client.broker.is_clustered))

    def _not_met(self) -> Iterator[Finding]:
        for prefill, decode in sorted(self._unmet_pairs):
            message = f"no job went from {prefill} to {decode}: others were quicker to take them"
            yield warn(self._model, message, "try again, or kvasir pause one of the others meanwhile")


def made_up_text(characters: int) -> str:
    """A text of about so many characters, code and prose, that no store has seen: its first line differs each time."""
    dice = random.Random(secrets.token_bytes(16))
    text = f"Text {secrets.token_hex(8)}, made up. Say in a few sentences what the code in it does.\n"
    while len(text) < characters:
        subject, place, statistic = dice.choice(_SUBJECTS), dice.choice(_PLACES), dice.choice(_STATISTICS)
        text += f"def {statistic}(values: list[float]) -> float:\n    return {statistic}(value for value in values)\n"
        text += f"The {subject} was seen again {place}, and nobody could say whether it would stay until spring.\n"
    return text[:characters]


def _registrations(client: Client, model: str, within_s: float) -> list[WorkerInfo]:
    """All registrations, once both stages of the model have one, or after `within_s`."""
    deadline = time.monotonic() + within_s
    registrations = client.workers()
    while time.monotonic() < deadline and {"prefill", "decode"} - {c.role for c in registrations if c.model == model}:
        time.sleep(0.1)
        registrations = client.workers()
    return registrations


def _live(registrations: Sequence[WorkerInfo], model: str, stage: WorkerStage) -> list[WorkerInfo]:
    return [
        registration
        for registration in registrations
        if registration.model == model and registration.role == stage and not registration.off
    ]

"""`kvasir doctor --try`: sends made-up jobs through every live pair of workers, and reports each KV transfer.

A job can't be addressed to a particular worker. So jobs are sent in rounds, each with as many jobs as the larger stage
has workers. It ends when each pair has had a job, or after four times as many jobs as there are pairs.
"""

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from engines.registry import entries
from infra.broker import topology
from infra.config.next_command import next_command
from kvasir.doctor.findings import Finding, Level, error, warn
from messages.errors import BrokerUnavailable
from messages.jobs import JobResult, KVTransfer, PrefillJob, Sampling, user_prompt
from messages.workers import WorkerInfo
from producers.client import Client
from producers.words import plural

PROMPT_TOKENS = 2000
ANSWER_TOKENS = 64
JOBS_PER_PAIR = 4
_LATE_S = 5.0  # an expired job's result comes at most this many seconds after the deadline

_SUBJECTS = ("river", "ferry", "bridge", "market", "garden", "school", "library", "harbour")
_PLACES = ("in the north", "by the sea", "near the old town", "on the hill", "under the trees", "at the border")
_STATISTICS = ("total", "mean", "largest", "smallest", "median", "spread", "count", "first")


@dataclass(frozen=True, slots=True)
class Trial:
    """What one job showed about its pair of workers. A rate of 0 was not measured."""

    level: Level
    model: str
    prefill: str  # worker id
    prefill_device: str
    decode: str
    decode_device: str
    kv_transfer: KVTransfer
    found: str  # why no KV was transferred, or what is wrong; "" if all is well
    prompt_tokens: int
    transferred_tokens: int
    evaluated_tokens: int  # prompt tokens that the decoder computed, by its own counter
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    kv_bytes: int
    # A lower bound, because the measured time includes saving, splitting and the wait for a decoder.
    put_bytes_per_s: float
    get_bytes_per_s: float
    total_s: float  # seconds from submission to the finished answer
    todo: str = ""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """All results of the trial of one model."""

    trials: tuple[Trial, ...]
    findings: tuple[Finding, ...]  # pairs that no job reached, and problems that kept jobs from running
    job_ids: tuple[str, ...] = ()  # that were sent

    @property
    def has_failed(self) -> bool:
        """Whether an expected KV transfer did not happen, or a job failed."""
        levels = [trial.level for trial in self.trials] + [finding.level for finding in self.findings]
        return "error" in levels


def served_models(client: Client) -> list[str]:
    """Return the configured models that have live workers of both stages."""
    registrations = client.workers()
    return [m for m in client.models if _live(registrations, m, "prefill") and _live(registrations, m, "decode")]


def try_model(client: Client, model: str, wait_s: float, registrations_within_s: float) -> TrialResult:
    """Send jobs in the lane `now` until every live pair has had one. `wait_s` limits the wait for each round.

    Workers that were just started may take `registrations_within_s` to register. Nothing is left behind at the broker.
    Raises BrokerUnavailable, NoQueue.
    """
    registrations = _registrations(client, model, registrations_within_s)
    absent = [stage for stage in ("prefill", "decode") if not _live(registrations, model, stage)]
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
    trials, findings, job_ids = _try_pairs(client, model, registrations, wait_s)
    return TrialResult(tuple(trials), (*off, *findings), tuple(job_ids))


def judge(result: JobResult, registrations: Sequence[WorkerInfo]) -> Trial:
    """Turn one job's result into a trial. `registrations` are those of the workers alive when the job was sent."""
    by_id = {registration.worker_id: registration for registration in registrations}
    prefill, decode = by_id.get(result.prefill.worker_id), by_id.get(result.decode.worker_id)
    level, problem, todo = _verdict(result, prefill, decode)
    prefill_report, decode_report = result.prefill, result.decode
    # Bytes of the whole transferred cache. The job itself may have stored less, because the store may have held the
    # template's first tokens already.
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
    """Return (level, what was found, what to do)."""
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
    """Whether the registrations promise a KV transfer.

    They promise none to a decode worker that took another model's job.
    """
    if prefill is None or decode is None or decode.model != model:
        return False
    return prefill.transfers_kv and decode.transfers_kv and prefill.fingerprint == decode.fingerprint != ""


def _put_window_s(result: JobResult) -> float:
    """Return the time in which all KV was put: after computing, or all of it if the engine puts while it computes.

    The report's `put_s` covers only what was left when the engine returned, so dividing by it would overstate the link.
    """
    entry = entries().get(result.prefill.engine)
    overlaps = bool(entry and entry.capabilities.blocks_while_computing)
    since_taken_s = result.decode.queue_s - result.prefill.queue_s
    return since_taken_s if overlaps else since_taken_s - result.prefill.prefill_s


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if amount > 0 and seconds > 0 else 0.0


def _try_pairs(
    client: Client, model: str, registrations: Sequence[WorkerInfo], wait_s: float
) -> tuple[list[Trial], list[Finding], list[str]]:
    """Send rounds of jobs until every pair has had one. Also returns the ids of the jobs."""
    prefills, decodes = (_live(registrations, model, stage) for stage in ("prefill", "decode"))
    unmet_pairs = {(prefill.worker_id, decode.worker_id) for prefill, decode in product(prefills, decodes)}
    jobs_left = JOBS_PER_PAIR * len(unmet_pairs)
    trials: list[Trial] = []
    job_ids: list[str] = []
    late: list[Finding] = []
    # If a job failed before it reached a decode worker, other jobs would fail too, so no more jobs are sent.
    while unmet_pairs and jobs_left and not late and not any(t.level == "error" and not t.decode for t in trials):
        size = min(jobs_left, max(len(prefills), len(decodes)))
        batch = f"doctor-{secrets.token_hex(8)}"
        jobs = [_job(client, batch, f"try-{number}", model, [*prefills, *decodes], wait_s) for number in range(size)]
        job_ids += [job.job_id for job in jobs]
        jobs_left -= size
        answered = 0
        try:
            for result in _results(client, jobs, wait_s):
                answered += 1
                trial = judge(result, registrations)
                pair = (trial.prefill, trial.decode)
                # The first job that reaches a pair is reported. A later job of this pair is reported only if the
                # job or its KV transfer failed.
                if trial.level == "error" or pair not in {(earlier.prefill, earlier.decode) for earlier in trials}:
                    trials.append(trial)
                unmet_pairs.discard(pair)
        finally:
            if answered < size:
                _leave(client, batch)
        if answered < size:
            message = f"{size - answered} of {plural(size, 'job')} had no answer within {wait_s:.0f} s"
            todo = f"{next_command('status')} says who is busy; --wait SECONDS waits longer"
            late = [error(model, message, todo)]
    not_met = [
        warn(
            model,
            f"no job went from {prefill} to {decode}: other workers took them first",
            "try again, or kvasir pause one of the others meanwhile",
        )
        for prefill, decode in sorted(unmet_pairs)
    ]
    return trials, late + not_met, job_ids


def _results(client: Client, jobs: Sequence[PrefillJob], wait_s: float) -> Iterator[JobResult]:
    """Send the jobs at once, and yield their results as they come."""
    client.submit(jobs)
    yield from client.gather(jobs[0].batch_id, [job.job_id for job in jobs], wait_s + _LATE_S)


def _job(client: Client, batch: str, name: str, model: str, workers: Sequence[WorkerInfo], wait_s: float) -> PrefillJob:
    tokens = min([PROMPT_TOKENS, *(worker.context // 2 for worker in workers)])
    letters = next(
        (worker.chars_per_token for worker in workers if worker.role == "prefill" and worker.chars_per_token), 4.0
    )
    answer = Sampling(min(ANSWER_TOKENS, max(1, tokens // 2)), temperature=0.0)
    prompt = user_prompt("", made_up_text(int(tokens * letters)))
    return client.new_job(batch, name, model, prompt, answer, lane="now", deadline=client.cluster_state.now() + wait_s)


def _leave(client: Client, batch: str) -> None:
    """Cancel the batch, so that workers drop its jobs, and delete its queue."""
    with suppress(BrokerUnavailable):
        client.cancel(batch)
        client.broker.delete_queue(topology.reply_queue(batch, client.broker.is_clustered))


def made_up_text(characters: int) -> str:
    """Return made-up code and prose of about this length.

    The first line is always new, so no store has seen the text.
    """
    dice = random.Random(secrets.token_bytes(16))
    text = f"Text {secrets.token_hex(8)}, made up. Say in a few sentences what the code in it does.\n"
    while len(text) < characters:
        subject, place, statistic = dice.choice(_SUBJECTS), dice.choice(_PLACES), dice.choice(_STATISTICS)
        text += f"def {statistic}(values: list[float]) -> float:\n    return {statistic}(value for value in values)\n"
        text += f"The {subject} was seen again {place}, and nobody could say whether it would stay until spring.\n"
    return text[:characters]


def _registrations(client: Client, model: str, within_s: float) -> list[WorkerInfo]:
    """Return all registrations, as soon as both stages of the model have one, or after `within_s`."""
    deadline = time.monotonic() + within_s
    registrations = client.workers()
    while time.monotonic() < deadline and {"prefill", "decode"} - {c.role for c in registrations if c.model == model}:
        time.sleep(0.1)
        registrations = client.workers()
    return registrations


def _live(registrations: Sequence[WorkerInfo], model: str, stage: str) -> list[WorkerInfo]:
    return [
        registration
        for registration in registrations
        if registration.model == model and registration.role == stage and not registration.off
    ]

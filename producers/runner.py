"""Runs a batch to its end: publish what is missing, journal what arrives, ack what is journaled.

Killed at any point and started again it goes on: the manifest says what was meant, `submitted.jsonl` what the broker
has, the journal what is done.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from infra import topology
from messages.jobs import LANES, JobResult, PrefillJob
from messages.lifecycle import Moment, Step
from producers.batch import Batch, Counts, Entry
from producers.client import Client, Replies, Reply
from producers.grade import Task

log = logging.getLogger(__name__)

_LOOK_AROUND_S = 2.0
_CONFIRMS_A_WRITE = 500
_BACKLOG_WAIT_S = 5.0


class Progress(Protocol):
    """Who is told how it goes."""

    def update(self, counts: Counts) -> None:
        """New figures."""

    def say(self, sentence: str) -> None:
        """Something a person should know now; the same sentence may come again."""


class Runner:
    """One owner's work on one batch. Needs the batch's folder lock and its reply queue, so there is only one."""

    def __init__(
        self, batch: Batch, tasks: Iterable[Task], client: Client, progress: Progress, deadline_s: float = 0.0
    ) -> None:
        """`tasks` is gone through once, when jobs are published, and not kept: it may be made as it is read.

        Jobs that it publishes expire `deadline_s` from now; 0: never.
        """
        self._batch = batch
        self._tasks = tasks
        self._client = client
        self._progress = progress
        self._deadline = client.board.now() + deadline_s if deadline_s else 0.0
        self._next_look = 0.0
        self._unconfirmed: list[PrefillJob] = []

    def run(self, max_wait_s: float | None = None) -> Counts:
        """Publish and wait until every job has its result, or `max_wait_s` is over. Raises as `Client.submit`."""
        self._client.broker.declare(self._client.models)
        replies = self._client.replies(self._batch.batch_id)
        try:
            self._catch_up(replies)
            self.submit()
            self._wait(replies, max_wait_s)
        finally:
            replies.close(delete=self._batch.is_done)
        return self._batch.counts()

    def submit(self) -> int:
        """Publish the jobs that the broker never confirmed, or lost since; returns how many."""
        self._reopen()
        try:
            return self._client.submit(self._to_publish(), self._confirmed)
        finally:
            self._write_confirms()

    def _catch_up(self, replies: Replies) -> None:
        """Journal what came while nobody listened: a job with a result there must not be taken for lost."""
        self._record(replies.parked())
        left = replies.backlog
        while left > 0 and (arrived := replies.take(_BACKLOG_WAIT_S)):
            self._record(arrived)
            left -= len(arrived)

    def _reopen(self) -> None:
        """Another run is wanted of jobs that were cancelled: their batch's tombstone would make workers drop it."""
        new_run = any(
            self._batch.run_of(entry.job_id) > 1 and not self._batch.is_confirmed(entry.job_id)
            for entry in self._batch.open_jobs()
        )
        if new_run and self._client.board.is_cancelled(self._batch.batch_id):
            self._client.reopen(self._batch.batch_id)

    def _to_publish(self) -> Iterator[PrefillJob]:
        waiting = self._batch.open_jobs()
        missing = {entry.job_id for entry in waiting if not self._batch.is_confirmed(entry.job_id)}
        confirmed = [entry for entry in waiting if entry.job_id not in missing]
        missing.update(entry.job_id for entry in self._stranded(confirmed))
        return (self._job(task) for task in self._tasks if task.job_id in missing) if missing else iter(())

    def _stranded(self, confirmed: list[Entry]) -> list[Entry]:
        """Confirmed jobs that are in no queue and on no worker: an in-process broker that is gone, a purged queue."""
        if not confirmed or _ready(self._client, topology.reply_queue(self._batch.batch_id)):
            return []
        if not _all_empty(self._client, {entry.model for entry in confirmed}):
            return []
        held = {job for card in self._client.workers() for job in card.jobs}
        return [entry for entry in confirmed if entry.job_id not in held]

    def _job(self, task: Task) -> PrefillJob:
        return self._client.new_job(
            self._batch.batch_id,
            task.item_id,
            task.model,
            task.prompt.shared,
            task.prompt.own,
            task.sampling,
            run=self._batch.run_of(task.job_id),
            submitted_at=self._batch.created_at,
            deadline=self._deadline,
            known_id=task.job_id,
        )

    def _confirmed(self, job: PrefillJob) -> None:
        self._unconfirmed.append(job)
        if len(self._unconfirmed) >= _CONFIRMS_A_WRITE:
            self._write_confirms()

    def _write_confirms(self) -> None:
        self._batch.confirm(self._unconfirmed)
        self._unconfirmed.clear()

    def _wait(self, replies: Replies, max_wait_s: float | None) -> None:
        started = time.monotonic()
        self._progress.update(self._batch.counts())
        while not self._batch.is_done:
            arrived = replies.take(0.3)
            if self._record(arrived):
                self._progress.update(self._batch.counts())
            if time.monotonic() > self._next_look:
                self._look_around(replies)
            if max_wait_s is not None and time.monotonic() - started > max_wait_s:
                return

    def _record(self, arrived: list[Reply]) -> list[JobResult]:
        """Journal first, ack after: the other order could lose a result."""
        if not arrived:
            return []
        new = self._batch.journal.record(reply.result for reply in arrived if self._is_ours(reply.result))
        for reply in arrived:
            reply.delivery.ack()
        self._seen(Step.JOURNALED, new)
        return new

    def _is_ours(self, result: JobResult) -> bool:
        """Whether a result is of a job of this batch: whoever may publish at the broker may publish anything."""
        ours = result.batch_id == self._batch.batch_id and result.job_id in self._batch
        if not ours:
            log.warning("left out a result of job %s: it is not one of batch %s", result.job_id, self._batch.batch_id)
        return ours

    def _seen(self, step: Step, results: Iterable[JobResult]) -> None:
        for result in results:
            facts = {"batch_id": result.batch_id, "run": result.run}
            self._client.observe(Moment(step, result.job_id, result.model, facts))

    def _look_around(self, replies: Replies) -> None:
        self._next_look = time.monotonic() + _LOOK_AROUND_S
        if replies.reopen():
            log.error("somebody deleted the reply queue of batch %s: opened it again", self._batch.batch_id)
            self._record(replies.parked())
        waiting = self._batch.open_jobs()
        if self._client.board.is_cancelled(self._batch.batch_id):
            written = self._batch.journal.record(cancelled(self._batch, waiting))
            self._seen(Step.CANCELLED, written)
            self._seen(Step.JOURNALED, written)
            self._progress.update(self._batch.counts())
            return
        jobs_of = Counter(entry.model for entry in waiting)
        for model in self._client.unserved(jobs_of):
            self._progress.say(f"nobody serves {model}: {jobs_of[model]} jobs wait until a decode worker is up")
        for model in self._client.unprefilled(jobs_of):
            self._progress.say(
                f"no prefill worker serves {model}: its decode workers do the prompts, which takes longer"
            )


def cancelled(batch: Batch, entries: Iterable[Entry]) -> list[JobResult]:
    """The results of jobs that were cancelled: their owner writes them, so that there is one even with no worker up."""
    return [
        JobResult(
            entry.job_id,
            batch.run_of(entry.job_id),
            batch.batch_id,
            entry.item_id,
            entry.model,
            "cancelled",
        )
        for entry in entries
    ]


def _all_empty(client: Client, models: Iterable[str]) -> bool:
    """Whether no queue holds a job of these models, asked twice: a quorum queue in a hurry answers 0."""
    names = [topology.retry_level(seconds) for seconds in topology.RETRY_LEVELS_S]
    for model in models:
        for stage in topology.WORK_STAGES:
            names += [topology.work_queue(stage, model, lane) for lane in LANES]
            names.append(topology.suspects_queue(stage, model))
    return all(_ready(client, name) == 0 for _ in range(2) for name in names)


def _ready(client: Client, queue: str) -> int:
    depth = client.broker.depth(queue)
    return depth.ready if depth else 0

"""Runs a batch to its end: publish what is missing, journal what arrives, ack what is journaled.

Killed at any point and started again it goes on: the manifest says what was meant, `submitted.jsonl` what the broker
has, the journal what is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from infra import topology
from messages.jobs import LANES, JobResult, PrefillJob
from messages.lifecycle import Moment, Step
from producers.batch import Batch, Counts, Entry
from producers.client import Client, Replies, Reply
from producers.grade import Task

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

    def __init__(self, batch: Batch, tasks: Iterable[Task], client: Client, progress: Progress) -> None:
        self._batch = batch
        self._tasks = {task.job_id: task for task in tasks}
        self._client = client
        self._progress = progress
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
            replies.close(delete=not self._batch.open_jobs())
        return self._batch.counts()

    def submit(self) -> int:
        """Publish the jobs that the broker never confirmed, or lost since; returns how many."""
        self._reopen()
        try:
            return self._client.submit(map(self._job, self._to_publish()), self._confirmed)
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

    def _to_publish(self) -> list[Entry]:
        waiting = [entry for entry in self._batch.open_jobs() if entry.job_id in self._tasks]
        confirmed = [entry for entry in waiting if self._batch.is_confirmed(entry.job_id)]
        again = {entry.job_id for entry in self._stranded(confirmed)}
        return [entry for entry in waiting if entry.job_id in again or not self._batch.is_confirmed(entry.job_id)]

    def _stranded(self, confirmed: list[Entry]) -> list[Entry]:
        """Confirmed jobs that are in no queue and on no worker: an in-process broker that is gone, a purged queue."""
        if not confirmed or _ready(self._client, topology.reply_queue(self._batch.batch_id)):
            return []
        if not _all_empty(self._client, {entry.model for entry in confirmed}):
            return []
        held = {job for card in self._client.workers() for job in card.jobs}
        return [entry for entry in confirmed if entry.job_id not in held]

    def _job(self, entry: Entry) -> PrefillJob:
        task = self._tasks[entry.job_id]
        return self._client.new_job(
            self._batch.batch_id,
            task.item_id,
            task.model,
            task.prompt.shared,
            task.prompt.own,
            task.sampling,
            run=self._batch.run_of(entry.job_id),
            submitted_at=self._batch.created_at,
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
        while self._batch.open_jobs():
            arrived = replies.take(0.3)
            if self._record(arrived):
                self._progress.update(self._batch.counts())
            if time.monotonic() > self._next_look:
                self._look_around()
            if max_wait_s is not None and time.monotonic() - started > max_wait_s:
                return

    def _record(self, arrived: list[Reply]) -> list[JobResult]:
        """Journal first, ack after: the other order could lose a result."""
        if not arrived:
            return []
        new = self._batch.journal.record(reply.result for reply in arrived)
        for reply in arrived:
            reply.delivery.ack()
        self._seen(Step.JOURNALED, new)
        return new

    def _seen(self, step: Step, results: Iterable[JobResult]) -> None:
        for result in results:
            facts = {"batch_id": result.batch_id, "run": result.run}
            self._client.observe(Moment(step, result.job_id, result.model, facts))

    def _look_around(self) -> None:
        self._next_look = time.monotonic() + _LOOK_AROUND_S
        waiting = self._batch.open_jobs()
        if self._client.board.is_cancelled(self._batch.batch_id):
            written = self._batch.journal.record(cancelled(self._batch, waiting))
            self._seen(Step.CANCELLED, written)
            self._seen(Step.JOURNALED, written)
            self._progress.update(self._batch.counts())
            return
        for model in self._client.unserved(entry.model for entry in waiting):
            jobs = sum(entry.model == model for entry in waiting)
            self._progress.say(f"nobody serves {model}: {jobs} jobs wait until a prefill and a decode worker are up")


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

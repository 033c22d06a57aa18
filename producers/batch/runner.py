"""Runs a batch to its end: publishes missing jobs, journals results, and acks journaled results.

It can be killed at any point and started again. The manifest says what was planned, `submitted.jsonl` what the broker
has, and the journal what is done.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

from infra.broker import topology
from messages.change import replace_fields
from messages.jobs import LANES, JobResult, PrefillJob
from messages.lifecycle import Event, Step
from producers.batch.batch import Batch, Counts
from producers.client import Client, Replies, Reply, version_problems
from producers.words import plural

log = logging.getLogger(__name__)

_LOOK_AROUND_S = 2.0
_CONFIRMS_A_WRITE = 500
_RESULTS_A_WRITE = 500
_STEPS = 20  # the progress bar has at least this many steps
_BACKLOG_WAIT_S = 5.0
# After this many checks without a new result, the runner looks for lost jobs and for results that have not arrived.
_QUIET_LOOKS = 3
_LOOKS_BEFORE_GIVING_UP = 2  # a result may have left its queue, but not arrived here yet


class Progress(Protocol):
    """Is told how a batch goes on."""

    def update(self, counts: Counts) -> None:
        """Take new counts."""

    def say(self, sentence: str) -> None:
        """Take a sentence that a person should read now. The same sentence may come again."""


class ReadAgain:
    """Jobs that are made again each time they are iterated, so that many prompts need not be kept in memory."""

    def __init__(self, jobs: Callable[[], Iterable[PrefillJob]]) -> None:
        self._jobs = jobs

    def __iter__(self) -> Iterator[PrefillJob]:
        return iter(self._jobs())


class Runner:
    """Runs one batch for its owner.

    It needs the batch's folder lock and its reply queue, so there is only one at a time.
    """

    def __init__(
        self, batch: Batch, jobs: Iterable[PrefillJob], client: Client, progress: Progress, deadline_s: float = 0.0
    ) -> None:
        """`jobs` is iterated when jobs are published, and again when the broker has lost some (`ReadAgain`).

        The runner sets each job's run, times and reply queue. Jobs expire `deadline_s` from now; 0: never.
        """
        self._batch = batch
        self._jobs = jobs
        self._client = client
        self._progress = progress
        self._deadline = client.cluster_state.now() + deadline_s if deadline_s else 0.0
        self._reply_queue = topology.reply_queue(batch.batch_id, client.broker.is_clustered)
        self._quiet_looks = 0
        self._lost_jobs: set[str] = set()  # open jobs that the last check found neither in a queue nor at a worker
        self._served_models: set[str] = set()  # models that had a decode worker at the last check

        # The results of a small batch are recorded in small groups, so that a person who watches sees progress.
        self._at_a_time = min(_RESULTS_A_WRITE, 1 + len(batch.entries) // _STEPS)

    def run(self, max_wait_s: float | None = None, stop: threading.Event | None = None) -> Counts:
        """Publish and wait until every job has its result, `max_wait_s` is over, or `stop` is set.

        Raises as `Client.submit` does. If the batch may not publish, this only waits for jobs that are under way.
        """
        batch, client = self._batch, self._client
        client.broker.declare(client.models)
        replies = Replies(client.broker, batch.batch_id)
        try:
            self._progress.update(batch.counts())
            if batch.confirmed_runs or replies.backlog:  # the batch was started before
                self._catch_up(replies)
            self.submit()
            ends = time.monotonic() + max_wait_s if max_wait_s is not None else math.inf
            next_look, nothing_came = 0.0, 0  # `nothing_came`: number of checks in a row that found no job under way
            while batch.open_jobs and nothing_came < _LOOKS_BEFORE_GIVING_UP:
                if new_replies := replies.receive(0.3, self._at_a_time):
                    self._record(new_replies)
                    self._quiet_looks = 0
                if time.monotonic() > next_look:
                    next_look = time.monotonic() + _LOOK_AROUND_S
                    self._look_around(replies)
                    nothing_came = 0 if batch.may_publish or new_replies or self._under_way() else nothing_came + 1
                if time.monotonic() > ends or (stop and stop.is_set()):
                    break
        finally:
            replies.close(delete=None not in batch.states.values())
        return batch.counts()

    def submit(self) -> int:
        """Publish the jobs that the broker never confirmed, or has lost since then. Returns how many."""
        batch = self._batch
        job_ids: Collection[str] = self._jobs_to_publish() if batch.confirmed_runs or batch.runs else batch.open_jobs
        if not job_ids or not batch.may_publish:
            return 0
        confirmed_jobs: list[PrefillJob] = []

        def on_confirmed(job: PrefillJob) -> None:
            confirmed_jobs.append(job)
            if len(confirmed_jobs) >= _CONFIRMS_A_WRITE:
                batch.note_confirmed(confirmed_jobs)
                confirmed_jobs.clear()

        jobs = (self._addressed(job) for job in self._jobs if job.job_id in job_ids)
        try:
            return self._client.submit(jobs, on_confirmed, self._client.turns({job.model for job in batch.entries}))
        finally:
            batch.note_confirmed(confirmed_jobs)

    def _addressed(self, job: PrefillJob) -> PrefillJob:
        """Return the job as it is published."""
        return replace_fields(
            job,
            run=self._batch.runs.get(job.job_id, 1),
            submitted_at=self._batch.created_at,
            deadline=self._deadline,
            reply_to=self._reply_queue,
        )

    def _record(self, replies: list[Reply]) -> None:
        """Journal results, then ack them: the other order could lose a result."""
        batch, own_results = self._batch, []
        for result in (reply.result for reply in replies):
            if result.batch_id == batch.batch_id and result.job_id in batch:
                own_results.append(result)
            else:  # any client of the broker can publish anything to this queue
                log.warning("ignored a result of job %s: it does not belong to batch %s", result.job_id, batch.batch_id)
        new = batch.journal.record(own_results)
        for reply in replies:
            reply.delivery.ack()
        self._tell(new, Step.JOURNALED)

    def _tell(self, results: list[JobResult], *steps: Step) -> None:
        for result in results:
            for step in steps:
                facts = {"batch_id": result.batch_id, "run": result.run}
                self._client.observe(Event(step, result.job_id, result.model, facts))
        if results:
            self._progress.update(self._batch.counts())

    # The methods below are for a batch that was run before, or that runs for a long time.

    def _catch_up(self, replies: Replies) -> None:
        """Journal the results that came while no process listened, so that their jobs don't count as lost."""
        self._record_parked(replies)
        backlog = replies.backlog
        while backlog > 0 and (new_replies := replies.receive(_BACKLOG_WAIT_S, self._at_a_time)):
            self._record(new_replies)
            backlog -= len(new_replies)

    def _record_parked(self, replies: Replies) -> None:
        for group in replies.receive_parked():
            self._record(group)

    def _jobs_to_publish(self) -> set[str]:
        """Return the open jobs that the broker never confirmed, or has lost since then."""
        batch = self._batch
        new_run = any(batch.runs.get(job, 1) > 1 and not batch.is_confirmed(job) for job in batch.open_jobs)
        # Cancelling a batch leaves a tombstone. The tombstone must be removed, because workers would otherwise drop the
        # new run.
        if new_run and self._client.cluster_state.is_cancelled(batch.batch_id):
            self._client.reopen(batch.batch_id)
        return batch.open_jobs.keys() - self._under_way()

    def _under_way(self) -> set[str]:
        """Return the open jobs that the broker confirmed and has not lost.

        It loses jobs when an embedded broker ends, or when a queue is purged.
        """
        batch, client = self._batch, self._client
        confirmed_jobs = {job for job in batch.open_jobs if batch.is_confirmed(job)}
        models = {batch.open_jobs[job].model for job in confirmed_jobs}
        if not confirmed_jobs or client.broker.ready(self._reply_queue) or not _all_empty(client, models):
            return confirmed_jobs
        return confirmed_jobs.intersection(job for registration in client.workers() for job in registration.jobs)

    def _look_around(self, replies: Replies) -> None:
        if replies.reopen():
            log.error("somebody deleted the reply queue of batch %s: declared it again", self._batch.batch_id)
            self._record_parked(replies)
        if self._quiet_looks >= _QUIET_LOOKS and self._client.broker.ready(self._reply_queue):
            log.info("results wait for batch %s, but none has come lately: subscribing again", self._batch.batch_id)
            self._record(replies.listen_anew())
            self._quiet_looks = 0
        if self._client.cluster_state.is_cancelled(self._batch.batch_id):
            self._tell(self._batch.journal.record(cancelled_results(self._batch)), Step.CANCELLED, Step.JOURNALED)
            return
        self._find_forgotten(replies)
        jobs_of = Counter(entry.model for entry in self._batch.open_jobs.values())
        unserved_models = self._client.unserved(jobs_of)
        # After a restart, an empty store knows no workers for about a second. So a model that had a worker at the last
        # check is reported only if the next check finds no worker either.
        for model in [model for model in unserved_models if model not in self._served_models]:
            jobs = plural(jobs_of[model], "job", "waits", "wait")
            self._progress.say(f"no decode worker serves {model}: {jobs} until one is started")
        self._served_models = jobs_of.keys() - unserved_models
        for problem, todo in version_problems(self._client.cluster_state):
            self._progress.say(f"{problem}; {todo}")
        for model in self._client.unprefilled(jobs_of):
            self._progress.say(
                f"no prefill worker serves {model}: its decode workers compute the prompts, which takes longer"
            )

    def _find_forgotten(self, replies: Replies) -> None:
        """Publish jobs again, under the same run, that the broker confirmed and lost: no queue and no worker has them.

        Jobs count as lost only if two checks in a row find them nowhere, no results have come for a while, and every
        worker is idle, since a busy worker may hold more deliveries than it reports. If no worker is seen, nothing is
        decided, because the store may be away or flushed.
        """
        self._quiet_looks += 1
        if self._quiet_looks < _QUIET_LOOKS or not self._batch.may_publish or not self._all_idle():
            self._lost_jobs = set()
            return
        lost_before, self._lost_jobs = self._lost_jobs, self._batch.open_jobs.keys() - self._under_way()
        if not self._lost_jobs or self._lost_jobs - lost_before:
            return
        self._record_parked(replies)
        self._quiet_looks, self._lost_jobs = 0, set()
        self._client.broker.declare(self._client.models)  # a queue may have been deleted
        if count := self.submit():
            notice = f"the broker had confirmed {plural(count, 'job')} and lost them: published again"
            log.error(notice)
            self._progress.say(notice)

    def _all_idle(self) -> bool:
        workers = self._client.workers()
        return bool(workers) and not any(worker.jobs for worker in workers)


def cancelled_results(batch: Batch) -> list[JobResult]:
    """Return the results of a cancelled batch's open jobs.

    The owner writes them, so they exist even if no worker runs.
    """
    return [
        JobResult(job, batch.runs.get(job, 1), batch.batch_id, entry.item_id, entry.model, "cancelled")
        for job, entry in batch.open_jobs.items()
    ]


def _all_empty(client: Client, models: Iterable[str]) -> bool:
    """Whether no queue holds a job of these models. It is asked twice, since a quorum queue answers 0 when it is slow.

    Queues that not every worker knows don't count. Jobs in them, while all workers are idle, are published again to
    other queues.
    """
    names = [topology.retry_level(seconds) for seconds in topology.RETRY_LEVELS_S]
    for model in models:
        for stage in topology.WORK_STAGES:
            turns = range(client.turn_count(model, if_unseen=topology.TURNS))
            names += [topology.work_queue(stage, model, lane, turn) for lane in LANES for turn in turns]
            names.append(topology.suspects_queue(stage, model))
    return all(client.broker.ready(name) == 0 for _ in range(2) for name in names)

"""Submits jobs for many callers over one connection, with one queue for their pieces and one for their results.

The broker's calls block, so they are made in threads. What arrives is handed to the callers' event loop.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

from infra.broker import topology
from messages.errors import BrokerUnavailable
from messages.jobs import JobResult, Lane, Part, Sampling, TokenEvent
from producers.client import Client, Replies, read_piece

log = logging.getLogger(__name__)

_POLL_S = 0.5
_THREADS = 16


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt for one model.

    `deadline_s` counts from now. `stream` says that the caller wants the pieces too. `tag`: see PrefillJob.
    """

    model: str
    prompt: tuple[Part, ...]
    sampling: Sampling
    lane: Lane
    stream: bool
    tag: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class NoResult:
    """Tells the caller that no result will come, and why."""

    reason: str


RunEvent = TokenEvent | JobResult | NoResult


@dataclass(eq=False)
class Run:
    """A job under way. Its pieces arrive in `events`, and its result arrives last."""

    loop: asyncio.AbstractEventLoop
    batch_id: str = field(default_factory=lambda: f"gateway-{secrets.token_hex(8)}")
    job_id: str = ""
    events: asyncio.Queue[RunEvent] = field(default_factory=asyncio.Queue)
    is_abandoned: bool = False  # True if the caller no longer waits for the answer

    def tell(self, event: RunEvent) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the event loop has ended, so nobody waits for the event
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Dispatcher:
    """Submits jobs and routes their pieces and results to the callers.

    Raises BatchError if another process has this name.

    `name` identifies this gateway at the broker. A gateway that starts again under the same name after a crash deletes
    the results that were left for it.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._runs: dict[str, Run] = {}
        self._replies = Replies(client.broker, name)
        self._reply_to = topology.reply_queue(name, client.broker.is_clustered)
        self._stream_to = client.broker.open_private_queue(f"stream.{name}-{secrets.token_hex(4)}", topology.STREAM)
        self._pieces = client.broker.consume(self._stream_to, prefetch=1000)
        self._pool = ThreadPoolExecutor(_THREADS, "gateway")
        self._closing = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(take,), name=f"gateway {name}", daemon=True)
            for take in (self._receive_piece, self._receive_results)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def works(self) -> bool:
        """Whether jobs can be sent and results received now."""
        return self._client.broker.is_connected and all(reader.is_alive() for reader in self._readers)

    async def start(self, ask: PromptRequest) -> Run:
        """Submit a job. The caller must call `leave` in the end. Raises BrokerUnavailable, NoQueue, InvalidMessage."""
        run = Run(asyncio.get_running_loop())
        try:
            await run.loop.run_in_executor(self._pool, self._submit, run, ask)
        except BaseException:
            self.leave(run)
            raise
        return run

    def leave(self, run: Run) -> None:
        """Stop waiting for a run, and cancel its job if it has no result. Returns at once; may be called repeatedly."""
        if not run.is_abandoned and (not run.job_id or self._runs.pop(run.job_id, None) is not None):
            run.is_abandoned = True
            with suppress(RuntimeError):  # the pool is shut down, so `close` has cancelled the job
                self._pool.submit(self._cancel, run)

    def end_all(self, reason: str) -> None:
        """Tell everybody who waits that no result will come."""
        for run in list(self._runs.values()):
            run.tell(NoResult(reason))

    def close(self) -> None:
        """Cancel all jobs under way, and delete this gateway's queues. Idempotent."""
        if self._closing.is_set():
            return
        for run in list(self._runs.values()):
            self.leave(run)
        self._closing.set()
        self._pool.shutdown()
        self._pieces.nudge()
        self._replies.nudge()
        for reader in self._readers:
            reader.join()
        with suppress(BrokerUnavailable):
            self._pieces.close()
            self._client.broker.delete_queue(self._stream_to)
            self._replies.close(delete=True)

    def _submit(self, run: Run, ask: PromptRequest) -> None:
        job = self._client.new_job(
            run.batch_id,
            "prompt",
            ask.model,
            ask.prompt,
            ask.sampling,
            lane=ask.lane,
            stream_to=self._stream_to if ask.stream else "",
            deadline=self._client.cluster_state.now() + ask.deadline_s,
        )
        run.job_id = job.job_id
        self._runs[job.job_id] = run
        self._client.submit([replace(job, reply_to=self._reply_to, tag=ask.tag)])
        if run.is_abandoned:  # the caller left while the job was being submitted
            self._cancel(run)

    def _cancel(self, run: Run) -> None:
        self._runs.pop(run.job_id, None)
        if run.job_id:
            self._client.cancel(run.batch_id)

    def _read(self, receive: Callable[[], None]) -> None:
        while not self._closing.is_set():
            try:
                receive()
            except BrokerUnavailable as error:
                log.warning("the broker is away: %s", error)
                self._closing.wait(_POLL_S)

    def _receive_piece(self) -> None:
        delivery = self._pieces.receive(_POLL_S)
        event = read_piece(delivery) if delivery else None
        if event and (run := self._runs.get(event.job_id)):
            run.tell(event)

    def _receive_results(self) -> None:
        for reply in self._replies.receive(_POLL_S):
            if run := self._runs.pop(reply.result.job_id, None):
                run.tell(reply.result)
            reply.delivery.ack()

"""The Client: puts jobs in and takes results out, over the in-process pipeline or over a cluster."""

import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from infra.broker import topology, trace
from infra.broker.base import Address, Broker, Delivery, Message
from infra.broker.control import announce_cancel, ring
from infra.broker.envelope import submit_message
from infra.config.next_command import UPGRADE_COMMAND, next_command
from kvstore.base import ClusterState, other_versions
from messages import codec
from messages.errors import BrokerUnavailable, ConfigError, InvalidMessage, KvasirError, NewerMessage, NoQueue
from messages.jobs import JobResult, Lane, Part, PrefillJob, Sampling, TokenEvent, job_id, user_prompt
from messages.lifecycle import Event, Step
from messages.workers import WorkerInfo

log = logging.getLogger(__name__)

_PUT_BACK_S = 5.0
_PARKED_AT_ONCE = 500
_PARKED_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A result and its delivery. Ack the delivery once the result is on disk."""

    result: JobResult
    delivery: Delivery


class Replies:
    """The results of one batch, as they arrive. Only one process at a time may listen to a batch."""

    def __init__(self, broker: Broker, batch_id: str) -> None:
        """Start listening. Raises BatchError if another process listens to this batch."""
        self._broker = broker
        self._batch_id = batch_id
        self._queue = broker.open_reply_queue(batch_id)
        self.backlog = broker.ready(self._queue)  # number of results that came while no process listened
        self._consumer = broker.consume(self._queue, prefetch=500, exclusive=True)

    def receive(self, timeout_s: float, at_most: int = 500) -> list[Reply]:
        """Return the results that have arrived, waiting at most `timeout_s` for the first."""
        replies: list[Reply] = []
        while len(replies) < at_most and (delivery := self._consumer.receive(timeout_s)):
            timeout_s = 0
            if reply := read_reply(delivery):
                replies.append(reply)
        return replies

    def nudge(self) -> None:
        """Make the waiting `receive` return at once. May be called from any thread."""
        self._consumer.nudge()

    def receive_parked(self) -> Generator[list[Reply]]:
        """Yield, in groups, this batch's parked results, which had found no reply queue.

        Those of other batches are put back. Ack each group before asking for the next: the broker sends no more than
        two unacked groups.
        """
        _, parked_queue = topology.parking_place(self._queue)
        parked_count = self._broker.ready(parked_queue)
        if not parked_count:
            return
        consumer = self._broker.consume(parked_queue, prefetch=2 * _PARKED_AT_ONCE)
        own_replies: list[Reply] = []
        foreign_deliveries: list[Delivery] = []
        try:
            for _ in range(parked_count):
                delivery = consumer.receive(_PARKED_WAIT_S)
                if delivery is None:
                    break
                if delivery.message.correlation_id != self._batch_id:
                    foreign_deliveries.append(delivery)
                elif reply := read_reply(delivery):
                    own_replies.append(reply)
                if len(foreign_deliveries) >= _PARKED_AT_ONCE:
                    self._park_again(foreign_deliveries)
                if len(own_replies) >= _PARKED_AT_ONCE:
                    yield own_replies
                    own_replies = []
        finally:
            self._park_again([*foreign_deliveries, *consumer.close()])
        if own_replies:
            yield own_replies

    def _park_again(self, deliveries: list[Delivery]) -> None:
        """Put results back in groups, so that 50,000 results of another batch don't delay our start."""
        to, _ = topology.parking_place(self._queue)
        self._broker.publish_many((to, delivery.message) for delivery in deliveries)
        for delivery in deliveries:
            delivery.ack()
        deliveries.clear()

    def reopen(self) -> bool:
        """Declare the queue again if it was deleted, and return whether it was.

        Results that came meanwhile were parked.
        """
        # While the broker is unavailable, it is unknown whether the queue exists. The next check will find out.
        with suppress(BrokerUnavailable):
            if self._broker.depth(self._queue) is None:
                self._broker.open_reply_queue(self._batch_id)
                return True
        return False

    def listen_anew(self) -> list[Reply]:
        """Subscribe again, for when results wait but none comes (see `ConsumerLoop`).

        Returns results that had arrived.
        """
        replies = [reply for delivery in self._consumer.pause() if (reply := read_reply(delivery))]
        self._consumer.resume()
        return replies

    def close(self, *, delete: bool = False, unread_replies: Iterable[Reply] = ()) -> None:
        """Stop listening. `delete` also deletes the queue, which is allowed only when every job has its result on disk.

        Otherwise `unread_replies`, and results that were never received, are put back for the next listener.
        """
        deliveries = [reply.delivery for reply in unread_replies] + self._consumer.close()
        if delete:
            return self._broker.delete_queue(self._queue)
        with suppress(BrokerUnavailable):  # if the connection is lost, the broker requeues unacked deliveries
            for delivery in deliveries:
                self._broker.publish(topology.reply(self._queue), delivery.message, _PUT_BACK_S)
                delivery.ack()


class Client(AbstractContextManager["Client"]):
    """Submits jobs and receives their results. Methods may be called from any thread.

    `kvasir.connect` makes it. Closing it also closes what was started for it.
    """

    def __init__(
        self,
        broker: Broker,
        cluster_state: ClusterState,
        models: Sequence[str],
        observe: Callable[[Event], None] = lambda _event: None,
        count_tokens: Callable[[str, str], int | None] = lambda _model, _text: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.broker = broker
        self.cluster_state = cluster_state
        self.models = tuple(models)
        self.observe = observe
        # Counts a text's tokens with the model's tokenizer; returns None if there is no tokenizer here.
        self.count_tokens = count_tokens
        self._on_close = on_close
        for remark in broker.declare(self.models):
            log.warning(remark)

    def __repr__(self) -> str:
        return f"<Client of {', '.join(self.models) or 'no model'}, over {type(self.broker).__name__}>"

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. Jobs that were submitted go on if the broker is a separate process. Idempotent."""
        self._on_close()

    def check_model(self, model: str) -> None:
        """Raise NoQueue if no queue exists for this model."""
        if model not in self.models:
            raise NoQueue(f"model {model!r} has no queue; configured models: {', '.join(self.models) or 'none'}")

    def turns(self, models: Iterable[str]) -> dict[str, int]:
        """Return, by model, the turn that a new batch should take: the one with the fewest waiting jobs.

        Raises BrokerUnavailable.
        """
        return {model: min(range(self.turn_count(model)), key=partial(self._waiting, model)) for model in models}

    def turn_count(self, model: str, if_unseen: int = 1) -> int:
        """Return how many turns all workers of the model know. It is 1 while a worker's release has no turns.

        If no worker is seen, return `if_unseen`.
        """
        counts = [registration.details.turns for registration in self.workers() if registration.model == model]
        return max(1, min([*counts, topology.TURNS])) if counts else if_unseen

    def _waiting(self, model: str, turn: int) -> int:
        queues = [topology.work_queue(stage, model, "bulk", turn) for stage in topology.WORK_STAGES]
        try:
            return self.broker.ready(*queues)
        except ConfigError:  # RabbitMQ 4.3 and newer hide queue lengths from producers, so choose at random
            return random.randrange(topology.TURNS)

    def submit(
        self,
        jobs: Iterable[PrefillJob],
        on_confirmed: Callable[[PrefillJob], None] = lambda _job: None,
        turns: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """Publish jobs with confirms in a window, and call `on_confirmed` for each. Returns how many.

        `turns` says by model which turn to use, as returned by the method `turns`; without it the first is used.

        Raises NoQueue for a model without a queue, and BrokerUnavailable if the broker stays away.
        """
        jobs_by_id: dict[str, PrefillJob] = {}

        def note_confirmed(message: Message) -> None:
            job = jobs_by_id.pop(message.message_id, None)
            if job is None:  # the job was published twice, and has already been reported
                return
            facts = {"batch_id": job.batch_id, "stage": "prefill", "run": job.run, "lane": job.lane}
            facts[trace.HEADER] = str(message.headers.get(trace.HEADER, ""))
            self.observe(Event(Step.SUBMITTED, job.job_id, job.model, facts))
            if job.lane == "now":
                ring(self.broker, topology.work_queue("prefill", job.model, "now"))
            on_confirmed(job)

        def sends() -> Iterator[tuple[Address, Message]]:
            for job in jobs:
                self.check_model(job.model)
                jobs_by_id[job.job_id] = job
                yield submit_message(job, turns.get(job.model, 0))

        return self.broker.publish_many(sends(), note_confirmed)

    def gather(self, batch_id: str, job_ids: Iterable[str], timeout_s: float | None = None) -> Iterator[JobResult]:
        """Yield the results of these jobs as they arrive, each once, until the last or after `timeout_s` of silence.

        A result is acked when the next one is requested, so store it before that. Leaving early loses nothing: results
        that were not acked can be gathered again.
        """
        open_ids = set(job_ids)
        replies = Replies(self.broker, batch_id)
        parked_replies = replies.receive_parked()  # results that came before this call
        new_replies: deque[Reply] = deque()
        try:
            silent_since = time.monotonic()
            while open_ids and (timeout_s is None or time.monotonic() - silent_since < timeout_s):
                while new_replies:
                    if new_replies[0].result.job_id in open_ids:
                        yield new_replies[0].result
                    open_ids.discard(new_replies[0].result.job_id)
                    new_replies.popleft().delivery.ack()
                    silent_since = time.monotonic()
                if open_ids:
                    new_replies += next(parked_replies, []) or replies.receive(0.5)
        finally:
            parked_replies.close()
            replies.close(delete=not open_ids, unread_replies=new_replies)

    def ask(self, model: str, prompt: str | tuple[Part, ...], sampling: Sampling, deadline_s: float = 0.0) -> JobResult:
        """Return the result of one prompt, which goes ahead of the bulk.

        `prompt` is a user's text or a conversation.
        """
        return [event for event in self.stream(model, prompt, sampling, deadline_s) if isinstance(event, JobResult)][-1]

    def stream(
        self, model: str, prompt: str | tuple[Part, ...], sampling: Sampling, deadline_s: float = 0.0
    ) -> Iterator[TokenEvent | JobResult]:
        """Yield the pieces of one prompt's answer as they are generated, and its result last.

        A piece with index 0 and another `delivery` than before means that decoding began again. Leaving before the
        result cancels the job.
        """
        self.check_model(model)
        batch_id = f"ask-{secrets.token_hex(8)}"
        queue = self.broker.open_private_queue(f"stream.{batch_id}", topology.STREAM)
        pieces = self.broker.consume(queue, prefetch=1000)
        job = self.new_job(
            batch_id,
            "prompt",
            model,
            user_prompt("", prompt) if isinstance(prompt, str) else prompt,
            sampling,
            lane="now",
            stream_to=queue,
            deadline=self.cluster_state.now() + deadline_s if deadline_s else 0.0,
        )
        replies = Replies(self.broker, batch_id)
        try:
            self.submit([job])
            yield from _until_result(pieces.receive, replies)
        except (GeneratorExit, KeyboardInterrupt):
            self.cancel(batch_id)  # nobody will read the answer
            raise
        finally:
            pieces.close()
            self.broker.delete_queue(queue)
            replies.close(delete=True)

    def new_job(
        self,
        batch_id: str,
        item_id: str,
        model: str,
        prompt: tuple[Part, ...],
        sampling: Sampling,
        run: int = 1,
        lane: Lane = "bulk",
        stream_to: str = "",
        deadline: float = 0.0,
    ) -> PrefillJob:
        """Return a job of this batch with its reply queue, and with the id that follows from its content."""
        return PrefillJob(
            job_id(batch_id, item_id, model, prompt, sampling),
            batch_id,
            item_id,
            model,
            prompt,
            sampling,
            run=run,
            lane=lane,
            submitted_at=self.cluster_state.now(),
            deadline=deadline,
            reply_to=topology.reply_queue(batch_id, self.broker.is_clustered),
            stream_to=stream_to,
        )

    def cancel(self, batch_id: str) -> None:
        """Stop a batch's jobs wherever they are. The batch's owner must write their `cancelled` results."""
        self.cluster_state.cancel(batch_id)
        announce_cancel(self.broker, batch_id)

    def reopen(self, batch_id: str) -> None:
        """Remove a batch's tombstone, so that workers take its next runs."""
        self.cluster_state.cancel(batch_id, ttl_s=0.001)  # a tombstone can't be deleted, but it can be made to expire
        time.sleep(0.01)

    def workers(self) -> list[WorkerInfo]:
        """Return the registrations of all live workers."""
        return self.cluster_state.registrations()

    def unserved(self, models: Iterable[str]) -> list[str]:
        """Return those of these models that no decode worker serves, so that their jobs wait."""
        return sorted(set(models) - self._served_models("decode"))

    def unprefilled(self, models: Iterable[str]) -> list[str]:
        """Return those of these models that have decode workers but no prefill worker.

        Decode then computes the prompts.
        """
        return sorted(self._served_models("decode").intersection(models) - self._served_models("prefill"))

    def _served_models(self, stage: str) -> set[str]:
        return {registration.model for registration in self.workers() if registration.role == stage}


def version_problems(cluster_state: ClusterState) -> list[tuple[str, str]]:
    """Return conflicts between this program and workers of other versions, each with what to do."""
    older_ids, newer_ids = other_versions(cluster_state.encoded_registrations())
    problems = []
    if older_ids:
        problem = f"workers of an older version can't read jobs from here, so these wait: {', '.join(older_ids)}"
        problems.append((problem, f"upgrade the workers first: {next_command('deploy', 'upgrade')}"))
    if newer_ids:
        problem = f"workers of a newer version can't be seen from here, though they answer: {', '.join(newer_ids)}"
        problems.append((problem, f"upgrade this program: {UPGRADE_COMMAND}"))
    return problems


def _until_result(receive: Callable[[float], Delivery | None], replies: Replies) -> Iterator[TokenEvent | JobResult]:
    """Yield pieces while they come, then the result.

    Pieces that are on their way when the result arrives come before it.
    """
    while True:
        arrivals = replies.receive(0)
        delivery = receive(0.0 if arrivals else 0.05)
        while delivery:
            if event := read_piece(delivery):
                yield event
            delivery = receive(0.05 if arrivals else 0.0)
        for reply in arrivals:
            reply.delivery.ack()
            yield reply.result
            return


def read_reply(delivery: Delivery) -> Reply | None:
    """Return the result in a delivery, or None.

    An unreadable message is acked and logged. A newer version's result stays in the queue until this program is
    upgraded.
    """
    try:
        return Reply(codec.decode(delivery.message.body, JobResult), delivery)
    except NewerMessage as error:
        log.error("left a result in the queue; upgrade to read it (%s): %s", UPGRADE_COMMAND, error)
        return None
    except InvalidMessage as error:
        log.error("dropped an unreadable result (job %s): %s", delivery.message.message_id or "unknown", error)
        delivery.ack()
        return None


def read_piece(delivery: Delivery) -> TokenEvent | None:
    """Return the piece of an answer in a delivery, which is acked; None if it contains no piece."""
    delivery.ack()
    try:
        return codec.decode(delivery.message.body, TokenEvent)
    except KvasirError:
        return None

"""The Client puts jobs in and takes results out. It works the same way with the in-process pipeline and with a
cluster."""

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
    """A result and its delivery. Ack the delivery once the result is safe."""

    result: JobResult
    delivery: Delivery


class Replies:
    """The results of one batch, as they arrive. Only one process may listen to a batch at a time."""

    def __init__(self, broker: Broker, batch_id: str) -> None:
        """Raises BatchError if another process listens to this batch."""
        self._broker = broker
        self._batch_id = batch_id
        self._queue = broker.open_reply_queue(batch_id)
        depth = broker.depth(self._queue)
        self.backlog = depth.ready if depth else 0  # results that came while no process listened
        self._consumer = broker.consume(self._queue, prefetch=500, exclusive=True)

    def receive(self, timeout_s: float, at_most: int = 500) -> list[Reply]:
        """The results that have arrived. Waits at most `timeout_s` seconds for the first."""
        replies: list[Reply] = []
        while len(replies) < at_most and (delivery := self._consumer.receive(timeout_s)):
            timeout_s = 0
            if reply := read_reply(delivery):
                replies.append(reply)
        return replies

    def nudge(self) -> None:
        """Make a waiting `receive` return at once. May be called from any thread."""
        self._consumer.nudge()

    def receive_parked(self) -> Generator[list[Reply]]:
        """This batch's results that were parked because they found no reply queue, in groups. Other batches' results
        are put back.

        Ack each group before you ask for the next, because the broker delivers at most two unacked groups.
        """
        _, parked_queue = topology.parking_place(self._queue)
        depth = self._broker.depth(parked_queue)
        if not depth or not depth.ready:
            return
        consumer = self._broker.consume(parked_queue, prefetch=2 * _PARKED_AT_ONCE)
        own_replies: list[Reply] = []
        foreign_deliveries: list[Delivery] = []
        try:
            for _ in range(depth.ready):
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
        """Put other batches' results back, many at once, because 50,000 of them must not delay this process."""
        to, _ = topology.parking_place(self._queue)
        self._broker.publish_many((to, delivery.message) for delivery in deliveries)
        for delivery in deliveries:
            delivery.ack()
        deliveries.clear()

    def reopen(self) -> bool:
        """Declare the queue again if it was deleted, and return whether it was. Results that came in the meantime were
        parked."""
        with suppress(BrokerUnavailable):  # the next look will tell
            if self._broker.depth(self._queue) is None:
                self._broker.open_reply_queue(self._batch_id)
                return True
        return False

    def listen_anew(self) -> list[Reply]:
        """Subscribe again, if results wait but none arrives (see ConsumerLoop). Returns replies that had arrived and
        were not read."""
        replies = [reply for delivery in self._consumer.pause() if (reply := read_reply(delivery))]
        self._consumer.resume()
        return replies

    def close(self, *, delete: bool = False, unread_replies: Iterable[Reply] = ()) -> None:
        """Stop listening. With `delete` the queue is deleted too, which is allowed only when every job has its result
        on disk.

        Otherwise `unread_replies`, and replies that were never received, are put back for the next listener.
        """
        deliveries = [reply.delivery for reply in unread_replies] + self._consumer.close()
        if delete:
            return self._broker.delete_queue(self._queue)
        with suppress(BrokerUnavailable):  # the broker then takes them back by itself
            for delivery in deliveries:
                self._broker.publish(topology.reply(self._queue), delivery.message, _PUT_BACK_S)
                delivery.ack()


class Client(AbstractContextManager["Client"]):
    """Submit jobs and receive their results. Methods may be called from any thread.

    Created by `kvasir.connect`. Closing it also closes everything that was started for it.
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
        self.count_tokens = count_tokens  # counts a text's tokens with the model's tokenizer; None: unavailable
        self._on_close = on_close
        for remark in broker.declare(self.models):
            log.warning(remark)

    def __repr__(self) -> str:
        return f"<Client of {', '.join(self.models) or 'no model'}, over {type(self.broker).__name__}>"

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. Jobs already submitted go on if the broker runs outside this process. Idempotent."""
        self._on_close()

    def check_model(self, model: str) -> None:
        """Raises NoQueue if no queue exists for this model."""
        if model not in self.models:
            raise NoQueue(f"model {model!r} has no queue; configured models: {', '.join(self.models) or 'none'}")

    def turns(self, models: Iterable[str]) -> dict[str, int]:
        """The best turn for a new batch, by model: the one with the fewest waiting jobs.

        Raises BrokerUnavailable.
        """
        return {model: min(range(self.turn_count(model)), key=partial(self._waiting, model)) for model in models}

    def turn_count(self, model: str, if_unseen: int = 1) -> int:
        """How many turns all workers of the model know: 1 while any worker is of a release without turns; `if_unseen`
        if no worker is visible."""
        counts = [registration.details.turns for registration in self.workers() if registration.model == model]
        return max(1, min([*counts, topology.TURNS])) if counts else if_unseen

    def _waiting(self, model: str, turn: int) -> int:
        queues = [topology.work_queue(stage, model, "bulk", turn) for stage in topology.WORK_STAGES]
        try:
            return sum(depth.ready for queue in queues if (depth := self.broker.depth(queue)))
        except ConfigError:  # RabbitMQ 4.3 and later forbid a producer to look, so any turn will do
            return random.randrange(topology.TURNS)

    def submit(
        self,
        jobs: Iterable[PrefillJob],
        on_confirmed: Callable[[PrefillJob], None] = lambda _job: None,
        turns: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """Publish jobs, with a limited number of outstanding confirms. Calls `on_confirmed` for each confirmed job.
        Returns how many.

        `turns` gives each model's turn, as the method `turns` returns it; otherwise jobs take the first turn.

        Raises NoQueue for a model without a queue, BrokerUnavailable if the broker stays away.
        """
        jobs_by_id: dict[str, PrefillJob] = {}

        def note_confirmed(message: Message) -> None:
            job = jobs_by_id.pop(message.message_id, None)
            if job is None:  # published twice, and already reported
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
        """Results of these jobs as they arrive, each once; ends after the last, or after `timeout_s` of silence.

        A result is acked when you ask for the next one, so save it before you ask. Leaving early loses nothing: results
        that were not acked can be gathered again.
        """
        open_ids = set(job_ids)
        replies = Replies(self.broker, batch_id)
        parked_replies = replies.receive_parked()  # results that arrived before this call
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
        """Ask one prompt and wait for its result. It goes ahead of `bulk`. `prompt` is a user's text, or a
        conversation."""
        return [event for event in self.stream(model, prompt, sampling, deadline_s) if isinstance(event, JobResult)][-1]

    def stream(
        self, model: str, prompt: str | tuple[Part, ...], sampling: Sampling, deadline_s: float = 0.0
    ) -> Iterator[TokenEvent | JobResult]:
        """Ask one prompt. Yields the pieces of the answer as they are generated, and the result last.

        A piece with index 0 and a different `delivery` means that the decode began again. Leaving before the result
        cancels the job.
        """
        self.check_model(model)
        batch_id = f"ask-{secrets.token_hex(8)}"
        queue = self.broker.open_private_queue(f"stream.{batch_id}", topology.STREAM)
        pieces = self.broker.consume(queue, prefetch=1000)
        deadline = self.cluster_state.now() + deadline_s if deadline_s else 0.0
        job = self.new_job(
            batch_id,
            "prompt",
            model,
            user_prompt("", prompt) if isinstance(prompt, str) else prompt,
            sampling,
            lane="now",
            stream_to=queue,
            deadline=deadline,
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
        """A job of this batch, addressed to the batch's reply queue. Its id follows from its content."""
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
        """Stop a batch's jobs wherever they are. Their owner has to write their `cancelled` results."""
        self.cluster_state.cancel(batch_id)
        announce_cancel(self.broker, batch_id)

    def reopen(self, batch_id: str) -> None:
        """Remove a batch's tombstone, so that workers accept its next runs."""
        self.cluster_state.cancel(batch_id, ttl_s=0.001)  # a tombstone can't be deleted, but it can expire
        time.sleep(0.01)

    def workers(self) -> list[WorkerInfo]:
        """The registrations of all live workers."""
        return self.cluster_state.registrations()

    def unserved(self, models: Iterable[str]) -> list[str]:
        """The models among these that no decode worker serves, so that their jobs wait."""
        return sorted(set(models) - self._served_models("decode"))

    def unprefilled(self, models: Iterable[str]) -> list[str]:
        """The models among these that have decode workers but no prefill worker, so that decode workers compute the
        prompts."""
        return sorted(self._served_models("decode").intersection(models) - self._served_models("prefill"))

    def _served_models(self, stage: str) -> set[str]:
        return {registration.model for registration in self.workers() if registration.role == stage}


def version_problems(cluster_state: ClusterState) -> list[tuple[str, str]]:
    """Version conflicts between this program and workers: each problem, and what to do about it."""
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
    """Yields pieces as they come, and then the result. Pieces still under way when the result arrives are yielded
    before it."""
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
    """The result in a delivery. Anything else is acked and logged. A newer version's result is left for the upgrade."""
    try:
        return Reply(codec.decode(delivery.message.body, JobResult), delivery)
    except NewerMessage as error:
        log.error("left a result in the queue, upgrade to read it (%s): %s", UPGRADE_COMMAND, error)
        return None
    except InvalidMessage as error:
        log.error("dropped an unreadable result (job %s): %s", delivery.message.message_id or "unknown", error)
        delivery.ack()
        return None


def read_piece(delivery: Delivery) -> TokenEvent | None:
    """The piece of an answer in a delivery, which is acked; None if there is no piece in it."""
    delivery.ack()
    try:
        return codec.decode(delivery.message.body, TokenEvent)
    except KvasirError:
        return None

"""What a decode worker knows, as figures for `policy`: its own measurements, and what it sees of the other workers.

At the end of its own queue, these say whether to leave the last jobs to faster workers (`Tail`).
"""

import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from decode_worker.stealing.policy import Offer, Peer, Queue, leave_to_faster
from engines.curves import MeasuredCurves
from infra.broker.base import Broker
from infra.broker.topology import jobs_waiting
from kvstore.base import ClusterState
from messages.jobs import DecodeJob, DecodeReport, answer_tokens
from messages.workers import BOTH_ROLES, WorkerInfo

# These guesses are used until a worker has measured its own values.
FIRST_ANSWER_TOKENS = 400.0  # tokens in an average answer
FIRST_TOKENS_PER_S = 40.0  # decode rate of one sequence
FIRST_FETCH_S = 0.5  # seconds to fetch a KV cache from the store

# The broker pushes jobs that take less time than this. Such jobs are not fetched ahead and not left to other workers,
# because deciding about such a job would cost as much time as the decision could save.
LONG_S = 0.5
# Workers renew their registrations once a second, so reading them more often would show little that is new.
REGISTRATIONS_FOR_S = 0.5
# The weight of a new value in a moving average. Old values lose weight, so the current batch counts more than last
# night's.
_WEIGHT = 0.1


@dataclass(slots=True)
class Averages:
    """Averages of one model on this worker; 0: not measured.

    A plain mean of ten jobs, then a moving average of about ten.
    """

    tokens_per_s: float = 0.0  # decode rate of one sequence
    answer_tokens: float = 0.0  # number of tokens in all answers of a job
    fetch_s: float = 0.0  # seconds to fetch a KV cache from the store
    jobs: int = 0
    fetches: int = 0


class Throughput:
    """Averages over this worker's jobs. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, Averages] = {}
        self.curves = MeasuredCurves()

    def note(self, model: str, report: DecodeReport, sequences: int = 1) -> None:
        """Add a decoded job to the averages. `sequences` ran at once at its end."""
        if not report.completion_tokens or report.decode_s <= 0:
            return
        self.curves.note(model, sequences, sequences * report.completion_tokens / report.decode_s)
        with self._lock:
            averages = self._models.setdefault(model, Averages())
            averages.jobs += 1
            weight = max(_WEIGHT, 1 / averages.jobs)
            averages.tokens_per_s += weight * (report.completion_tokens / report.decode_s - averages.tokens_per_s)
            averages.answer_tokens += weight * (report.completion_tokens - averages.answer_tokens)
            if report.transferred_tokens:
                averages.fetches += 1
                averages.fetch_s += max(_WEIGHT, 1 / averages.fetches) * (report.get_s - averages.fetch_s)

    def of(self, model: str) -> Averages:
        """Return the averages of a model."""
        with self._lock:
            return replace(self._models.get(model, Averages()))

    def fetch_s(self, model: str) -> float:
        """Return the expected time to fetch a KV cache: as measured for this model, for any model, or a first guess."""
        with self._lock:
            model_averages = [self._models[model]] if model in self._models else []
            values = [averages.fetch_s for averages in [*model_averages, *self._models.values()]]
        return next((value for value in values if value > 0), FIRST_FETCH_S)

    def decode_s(self, model: str) -> float:
        """Return the mean time of a job of this model, without its KV cache; infinite until one was decoded here."""
        averages = self.of(model)
        return averages.answer_tokens / averages.tokens_per_s if averages.tokens_per_s else math.inf

    def expected_s(self, job: DecodeJob) -> float:
        """Return the expected time of a job in a slot, from what is known before it is decoded."""
        averages = self.of(job.job.model)
        max_tokens = answer_tokens(job.job)
        tokens = min(max_tokens, averages.answer_tokens or max_tokens)
        return expected_service_s(tokens, averages.tokens_per_s, averages.fetch_s)


def expected_service_s(answer_tokens: float, tokens_per_s: float, fetch_s: float = 0.0) -> float:
    """Return the mean time of a job in a slot: its KV cache, then its tokens.

    Values up to 0 are replaced by first guesses.
    """
    tokens = answer_tokens if answer_tokens > 0 else FIRST_ANSWER_TOKENS
    rate = tokens_per_s if tokens_per_s > 0 else FIRST_TOKENS_PER_S
    return fetch_s + tokens / rate


class QueueForecast:
    """One worker's view of queues and workers. Thread-safe.

    It reads registrations at most twice a second, and queues whenever it is asked.
    """

    def __init__(self, broker: Broker, cluster_state: ClusterState, throughput: Throughput, worker_id: str) -> None:
        self._broker = broker
        self._cluster_state = cluster_state
        self._throughput = throughput
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._registrations: list[WorkerInfo] = []
        self._sees_everybody = False
        self._active: set[str] = set()  # models with jobs in prefill or decode at another worker
        self._waiting_models: set[str] = set()  # models that had waiting jobs at the last check
        self._read_at = -math.inf

    def other_workers(self, model: str = "") -> list[WorkerInfo]:
        """Return the registrations of all other decode workers, or of those that serve this model's queue."""
        with self._lock:
            if time.monotonic() - self._read_at > REGISTRATIONS_FOR_S:
                registrations = self._cluster_state.registrations()
                self._active = {
                    registration.model
                    for registration in registrations
                    if registration.busy and registration.worker_id != self._worker_id
                }
                self._sees_everybody = any(registration.worker_id == self._worker_id for registration in registrations)
                self._registrations = [
                    registration
                    for registration in registrations
                    if registration.role == "decode" and registration.worker_id != self._worker_id
                ]
                self._read_at = time.monotonic()
            return [registration for registration in self._registrations if model in ("", registration.model)]

    def read_anew(self) -> None:
        """Read the registrations again the next time they are needed."""
        with self._lock:
            self._read_at = -math.inf

    def sees_everybody(self) -> bool:
        """Whether the registrations are complete: ours is among them, which is not so while the store is away."""
        self.other_workers()
        with self._lock:
            return self._sees_everybody

    def is_active(self, models: Iterable[str]) -> bool:
        """Whether another worker is busy with one of these models, so that jobs may soon wait."""
        self.other_workers()
        with self._lock:
            return not self._active.isdisjoint(models)

    def queue(self, model: str, in_hand: int = 0) -> Queue:
        """Return a model's decode queue, both lanes, as the broker counts it now.

        `in_hand` jobs that could go back are added. Workers with both roles keep few jobs ready on purpose, so where
        they serve the model, waiting prompts count as jobs. Raises BrokerUnavailable.
        """
        ready = jobs_waiting(self._broker, "decode", model) + in_hand
        if ready and any(registration.details.roles == BOTH_ROLES for registration in self.other_workers(model)):
            ready += jobs_waiting(self._broker, "prefill", model)
        return Queue(model, ready, self.peers(model))

    def waiting_queue(self, model: str) -> Queue:
        """Return what `queue` does, for a worker of another model that might help there. Raises BrokerUnavailable.

        If jobs wait at two calls in a row, no worker is free there, whatever the registrations say: they may be a
        second old, and a free worker takes a job within milliseconds.
        """
        queue = self.queue(model)
        if queue.ready and model in self._waiting_models:
            queue = replace(queue, peers=tuple(replace(peer, busy=peer.slots) for peer in queue.peers))
        (self._waiting_models.add if queue.ready else self._waiting_models.discard)(model)
        return queue

    def offer(self, model: str, load_s: float) -> Offer:
        """Return a model's `waiting_queue`, and what one of its jobs would cost here. Raises BrokerUnavailable."""
        queue = self.waiting_queue(model)
        return Offer(queue, self.decode_s(model), self._throughput.fetch_s(model), load_s)

    def decode_s(self, model: str) -> float:
        """Return the mean time of a job of this model in one of this worker's slots, once its KV cache is there.

        Until it is measured here, this worker is assumed to be as fast as the model's own workers, or else as the first
        guess.
        """
        rate = self._throughput.of(model).tokens_per_s or _mean(
            registration.figures_for(model)[0] for registration in self.other_workers(model)
        )
        return expected_service_s(self._answer_tokens(model), rate)

    def _answer_tokens(self, model: str) -> float:
        """Return the mean length of an answer over all workers that have measured it; 0: none has."""
        lengths = [registration.figures_for(model)[1] for registration in self.other_workers()] + [
            self._throughput.of(model).answer_tokens
        ]
        return _mean(lengths)

    def peers(self, model: str) -> tuple[Peer, ...]:
        """Return the workers whose home model this is and that take jobs.

        Fetching is assumed to take them as long as us.
        """
        tokens, fetch_s = self._answer_tokens(model), self._throughput.fetch_s(model)
        peers = []
        for registration in self.other_workers(model):
            if registration.off:
                continue
            rate = registration.figures_for(model)[0] or registration.tokens_per_s
            peers.append(Peer(registration.slots, registration.busy, expected_service_s(tokens, rate, fetch_s)))
        return tuple(peers)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The forecast of the worker's own queue at the last check.

    Jobs use it instead of asking the broker and the store.
    """

    decode_s: float  # mean time of a job
    is_measured: bool  # whether this worker has decoded a job of this model
    has_peers: bool  # whether this model is the home model of other workers too
    may_leave: bool  # whether another worker with this home model is fast enough to take over the last jobs
    at: float  # monotonic clock

    @property
    def are_short(self) -> bool:
        """Whether jobs are so short that they are pushed."""
        return self.decode_s < LONG_S


def look_at_home(forecast: QueueForecast, throughput: Throughput, model: str) -> Outlook:
    """Return the outlook now. This reads registrations, but asks no queue."""
    forecast.read_anew()
    decode_s, is_measured = forecast.decode_s(model), throughput.of(model).jobs > 0
    peers = forecast.peers(model)
    may_leave = decode_s >= LONG_S and any(peer.is_faster(decode_s) for peer in peers)
    return Outlook(decode_s, is_measured, bool(peers), may_leave, time.monotonic())


class Tail:
    """Decides whether to leave the next job of our own queue to faster workers. Used from one thread.

    Faster workers may be stuck. If jobs wait for more than twice the time in which they should have ended, they are
    taken here.
    """

    def __init__(self, forecast: QueueForecast, throughput: Throughput, model: str) -> None:
        self._forecast = forecast
        self._throughput = throughput
        self._model = model
        # Monotonic time until which the queue is left to other workers.
        self.next_look = 0.0
        # Monotonic time when this worker began to leave jobs to others, or when the queue last shrank after that. 0 if
        # this worker leaves no jobs to others.
        self._since = 0.0
        self._ready = 0
        self.jobs_left = 0

    def should_leave(self, outlook: Outlook, in_hand: int = 0) -> bool:
        """Whether to leave the next job, counting those that wait and those `in_hand`. Raises BrokerUnavailable."""
        end_there_s = None
        if outlook.may_leave:
            queue = self._forecast.queue(self._model, in_hand)
            end_there_s = leave_to_faster(queue, outlook.decode_s, self._throughput.fetch_s(self._model))
        if end_there_s is None or self._waited_enough(queue.ready, end_there_s):
            self._since = 0.0
            return False
        self.jobs_left += 1
        self.next_look = time.monotonic() + min(1.0, max(0.1, end_there_s / 10))
        return True

    def _waited_enough(self, ready: int, end_there_s: float) -> bool:
        now = time.monotonic()
        if not self._since or ready < self._ready or not ready:
            self._since, self._ready = now, ready
        return now - self._since > 2 * end_there_s + 2


def _mean(values: Iterable[float]) -> float:
    positives: Sequence[float] = [value for value in values if value > 0]
    return sum(positives) / len(positives) if positives else 0.0

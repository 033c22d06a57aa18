"""A pipeline in one process for tests: broker, store, workers as threads, and seams where a test makes things fail.

    with Pipeline() as pipeline:
        pipeline.start_prefill()
        pipeline.start_decode()
        result = pipeline.run(pipeline.job("print(1)"))

On leaving, everything is stopped, and every step that was observed must have been a legal one.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import Answer, LoadedEngine, TokenizedPrompt
from engines.registry import EngineOptions
from engines.simulated.engine import SimulatedEngine, parse_weights
from engines.sketch import Sketch, Sketches
from infra.broker import topology
from infra.broker.base import Message
from infra.broker.control import ring
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from infra.worker_loop import OneByOne
from kvasir.worker.both_roles import TwoRoleWorker
from kvstore.base import ClusterState
from kvstore.blocks import BlockRef, block_refs, shared_boundary
from kvstore.cache import CachedKVStore
from kvstore.memory import DEFAULT_MAX_BYTES, MemoryClusterState, MemoryKVStore
from messages.errors import Cancelled, StoreUnavailable
from messages.jobs import KV_CHECK_EVERY, JobResult, Part, PrefillJob, PrefillReport, Sampling, user_prompt
from messages.kv import Block, KVCache, KVLayout, Record
from messages.lifecycle import Event, Step
from messages.workers import WorkerStage
from prefill_worker.worker import PrefillWorker
from producers.batch.batch import Counts
from producers.client import Client, Replies
from tests.support.faults import drop
from tests.support.path_checker import PathChecker
from tests.support.waiting import wait_until

MODEL = "tiny:1b"
BATCH = "batch"
INSTANT = "sim:scale=0,answer=8"
SLOW = "sim:scale=1,prefill=1000000,decode=0.1,answer=8"  # the same answers, at ten seconds a token
SHARED_TEXT = "Grade by this rubric. " * 40  # 220 tokens
OWN_TEXT = "def answer(): return 42\n" * 10  # 60 tokens: with SHARED too many for a decoder to prefill without need

Effect = Callable[[Sequence[int], threading.Event | None], None]


class Gate:
    """An effect that holds a call until `open`, or until the call is told to stop."""

    def __init__(self) -> None:
        self.call_arrived = threading.Event()
        self._is_open = threading.Event()

    def __call__(self, _tokens: Sequence[int], stop: threading.Event | None) -> None:
        self.call_arrived.set()
        while not self._is_open.wait(0.01):
            if stop is not None and stop.is_set():
                raise Cancelled("stopped at the gate")

    def wait(self) -> None:
        """Return once a call is held."""
        assert self.call_arrived.wait(10), "no call came to the gate"

    def open(self) -> None:
        """Let all calls pass, now and later."""
        self._is_open.set()


def fails(*errors: BaseException) -> Effect:
    """An effect that raises each of these, one a call, and then no more."""
    errors_to_raise = deque(errors)

    def effect(_tokens: Sequence[int], _stop: threading.Event | None) -> None:
        if errors_to_raise:
            raise errors_to_raise.popleft()

    return effect


def always_fails(error: Exception) -> Effect:
    """An effect that raises on every call."""

    def effect(_tokens: Sequence[int], _stop: threading.Event | None) -> None:
        raise error

    return effect


class WatchedEngine(SimulatedEngine):
    """The simulated engine: it counts its calls, and an effect set by the test comes before each."""

    def __init__(self, weights: str = INSTANT, slots: int = 2, context: int = 4096) -> None:
        super().__init__(parse_weights(weights), EngineOptions(weights, context, slots))
        self.before_prefill: Effect = fails()
        self.before_decode: Effect = fails()
        self.prefill_calls: list[tuple[int, ...]] = []
        self.decode_calls: list[tuple[int, ...]] = []
        self.tokenize_calls = 0
        self.imports = 0  # of KV caches from which several answers are forked
        self.cache_checks = 0  # KV caches that were compared with one of its own
        self.bias_nats = 0.0  # nats by which a transferred KV cache misleads it
        self.before_check: Callable[[], object] = lambda: None
        self.outage = ""  # why, as engines say it whose program is another process

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        self.tokenize_calls += 1
        return super().tokenize(prompt, clock)

    def prefill(
        self, tokens: Sequence[int], emit: Any, first: int = 0, resume: KVCache | None = None, stop: Any = None
    ) -> PrefillReport:
        self._note(tuple(tokens))
        self.before_prefill(tokens, stop)
        return super().prefill(tokens, emit, first, resume, stop)

    def _note(self, tokens: tuple[int, ...]) -> None:
        """One entry a job: its class-wide part, computed first and by itself, is not counted again."""
        last = self.prefill_calls[-1] if self.prefill_calls else ()
        if last and len(last) < len(tokens) and tokens[: len(last)] == last:
            self.prefill_calls.pop()
        self.prefill_calls.append(tokens)

    def decode(
        self, tokens: Sequence[int], cache: KVCache | None, sampling: Sampling, on_text: Any = None, stop: Any = None
    ) -> Answer:
        self.decode_calls.append(tuple(tokens))
        self.before_decode(tokens, stop)
        return super().decode(tokens, cache, sampling, on_text, stop)

    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> AbstractContextManager[None]:
        self.imports += 1
        return super().pin_cache(tokens, cache)

    def top_logprobs(self, tokens: Sequence[int], cache: KVCache | None, stop: Any = None) -> dict[int, float]:
        expected = super().top_logprobs(tokens, cache, stop)
        if cache is None:
            self.before_check()
            return expected
        self.cache_checks += 1
        return {id: value - self.bias_nats for id, value in expected.items()}


class WatchedStore(MemoryKVStore):
    """The store in memory: its operations named in `failing_calls` fail, and a record in it can be damaged."""

    def __init__(self, clock: Callable[[], float] | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        super().__init__(max_bytes, clock or time.monotonic)
        self.failing_calls: set[str] = set()
        self.refusals = 0  # calls of those
        self.stored_refs: list[BlockRef] = []

    def find_missing(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        self._check("missing")
        return super().find_missing(refs)

    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        self._check("put")
        records = list(records)
        self.stored_refs += [ref for ref, _ in records]
        return super().put(fingerprint, layout, records)

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        self._check("get")
        return super().get(fingerprint, layout, refs)

    def delete(self, refs: Sequence[BlockRef]) -> None:
        self._check("delete")
        super().delete(refs)

    def flip_a_byte(self, ref: BlockRef) -> None:
        """Damage a stored record's payload."""
        held = self._held.get(ref.key)
        assert held
        data = held.record.data.copy()
        data.view(np.uint8).flat[-1] ^= 1
        self._held.put(ref.key, replace(held, record=replace(held.record, data=data)), 3600)

    def _check(self, operation: str) -> None:
        if operation in self.failing_calls:
            self.refusals += 1
            raise StoreUnavailable(f"{operation}: the store was unplugged by the test")


class HybridEngine(WatchedEngine):
    """One whose model keeps a recurrent state in its first layer, as it says."""

    def __init__(self) -> None:
        super().__init__()
        assert self.info.layout
        self.info = replace(self.info, layout=replace(self.info.layout, recurrent_layers=(0,)))


class WorkerDied(BaseException):
    """A worker's sudden death, as far as one process can show it: nothing that it holds is settled."""


@dataclass(eq=False)
class SupervisedWorker:
    """A worker in its thread, with a broker client of its own. If it dies, its supervisor starts it again."""

    make: Callable[[], Any]
    engine: WatchedEngine
    broker: EmbeddedBroker
    worker: Any = field(init=False)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.worker = self.make()
        self.thread = threading.Thread(target=self._supervise, name=type(self.worker).__name__, daemon=True)
        self.thread.start()

    def _supervise(self) -> None:
        while True:
            try:
                return self.worker.run()
            except WorkerDied:
                self.worker = self.make()

    def dies_of(self, prompt: str) -> Effect:
        """An effect: this prompt takes the worker and its channel along."""
        tokens = self.engine.tokenize(user_prompt("", prompt), 0.0).ids

        def effect(tokens_of_call: Sequence[int], _stop: threading.Event | None) -> None:
            if tuple(tokens_of_call) in (tokens, tokens[:-1]):
                drop(self.broker)
                raise WorkerDied

        return effect

    def stop(self, abort: bool = False) -> None:
        """Tell it to leave."""
        self.worker.stop(abort)
        ring(self.broker, "nothing")  # so that its housekeeping looks up at once

    def wait_until_left(self) -> None:
        """Return once it has left."""
        self.thread.join(10)
        assert not self.thread.is_alive(), f"{self.thread.name} did not leave"
        self.broker.close()


class RecordingProgress:
    """Keeps what a Runner tells of its progress."""

    def __init__(self) -> None:
        self.counts: list[Counts] = []
        self.sentences: list[str] = []

    def update(self, counts: Counts) -> None:
        """New figures."""
        self.counts.append(counts)

    def say(self, sentence: str) -> None:
        """Something a person should know."""
        self.sentences.append(sentence)


class Pipeline:
    """Broker, store and cluster state; workers as they are started; a client; and what was observed.

    `steps`: how its workers do their jobs.
    """

    def __init__(
        self,
        kv: WatchedStore | None = None,
        unseen_copies: bool = False,
        steps: Callable[..., OneByOne[Any]] = OneByOne,
    ) -> None:
        self._steps = steps
        self.server = EmbeddedServer()
        self.kv = kv or WatchedStore()
        self.cluster_state: ClusterState = MemoryClusterState()
        self.events: list[Event] = []
        self.checker = PathChecker(unseen_copies)
        self.workers: list[SupervisedWorker] = []
        self._brokers: list[EmbeddedBroker] = []
        self._replies: dict[str, Replies] = {}
        self._results: list[JobResult] = []
        self.broker = self.new_broker()
        self.client = Client(self.broker, self.cluster_state, [MODEL], self.observe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self.workers:
            worker.stop(abort=True)
        for worker in self.workers:
            worker.wait_until_left()
        for broker in self._brokers:
            broker.close()
        if error is None:
            assert self.checker.illegal() == []

    def observe(self, event: Event) -> None:
        """The observer of everybody here."""
        self.events.append(event)
        self.checker(event)

    def new_broker(self) -> EmbeddedBroker:
        """One more client of the broker, closed at the end."""
        self._brokers.append(EmbeddedBroker(self.server))
        return self._brokers[-1]

    # Workers

    def start_prefill(
        self,
        engine: WatchedEngine | None = None,
        why_no_kv: str = "",
        sketch: Sketch | None = None,
        free_bytes: int = 0,
    ) -> SupervisedWorker:
        """A prefill worker, its registration up."""
        loaded_engine = LoadedEngine(engine or WatchedEngine(), why_no_kv, Sketches(sketch, self.cluster_state))
        worker = partial(PrefillWorker, MODEL, loaded_engine, steps=self._steps, free_bytes=free_bytes)
        return self._start(worker, loaded_engine.engine)

    def start_decode(
        self,
        engine: WatchedEngine | None = None,
        why_no_kv: str = "",
        sketch: Sketch | None = None,
        kv_check_every: int = KV_CHECK_EVERY,
    ) -> SupervisedWorker:
        """A decode worker, its registration up."""
        loaded_engine = LoadedEngine(engine or WatchedEngine(), why_no_kv, Sketches(sketch, self.cluster_state))
        cache = ModelCache(CachedModel(MODEL, 0, loaded_engine))
        worker = partial(DecodeWorker, cache, kv_check_every=kv_check_every, steps=self._steps)
        return self._start(worker, loaded_engine.engine)

    def start_both(self, engine: WatchedEngine | None = None, kept_bytes: int = 1 << 30) -> SupervisedWorker:
        """A worker with both roles, its registrations up. `kept_bytes`: of KV caches in its memory."""
        loaded_engine: LoadedEngine[WatchedEngine] = LoadedEngine(
            engine or WatchedEngine(), "", Sketches(None, self.cluster_state)
        )

        def make(broker: EmbeddedBroker, *rest: Any) -> TwoRoleWorker:
            store, *others = rest
            shared = broker, CachedKVStore(store, kept_bytes, keeps_puts=True), *others
            cache = ModelCache(CachedModel(MODEL, 0, loaded_engine))
            return TwoRoleWorker(
                partial(PrefillWorker, MODEL, loaded_engine, *shared, steps=self._steps),
                partial(DecodeWorker, cache, *shared, steps=self._steps),
                *(MODEL, broker, self.cluster_state),
            )

        return self._start(make, loaded_engine.engine)

    def start(self, weights: str = INSTANT) -> tuple[SupervisedWorker, SupervisedWorker]:
        """One of each."""
        return self.start_prefill(WatchedEngine(weights)), self.start_decode(WatchedEngine(weights))

    def leave(self, worker: SupervisedWorker, abort: bool = False) -> None:
        """A worker leaves in good order."""
        worker.stop(abort)
        worker.wait_until_left()
        self.workers.remove(worker)

    def _start(
        self, worker: Callable[..., PrefillWorker | DecodeWorker | TwoRoleWorker], engine: WatchedEngine
    ) -> SupervisedWorker:
        broker = EmbeddedBroker(self.server)
        new_worker = SupervisedWorker(lambda: worker(broker, self.kv, self.cluster_state, self.observe), engine, broker)
        self.workers.append(new_worker)
        my_id = new_worker.worker.worker_id
        wait_until(
            lambda: my_id in [registration.worker_id for registration in self.cluster_state.registrations()],
            "its registration is up",
        )
        return new_worker

    # Jobs and results

    def job(
        self, own_text: str = OWN_TEXT, shared_text: str = SHARED_TEXT, batch: str = BATCH, **fields: Any
    ) -> PrefillJob:
        """A job of a batch; its item is numbered by its text."""
        sampling = fields.pop("sampling", Sampling(max_tokens=16))
        job = self.client.new_job(
            batch, f"item-{zlib.crc32(own_text.encode())}", MODEL, user_prompt(shared_text, own_text), sampling
        )
        return replace(job, **fields)

    def submit(self, *jobs: PrefillJob) -> None:
        """Publish jobs whose results will be listened to."""
        for job in jobs:
            self.listen(job.batch_id)
        for job in jobs:
            self.client.submit([job])

    def run(self, job: PrefillJob) -> JobResult:
        """Submit a job and wait for its result."""
        self.submit(job)
        return self.result(job)

    def result(self, job: PrefillJob) -> JobResult:
        """The first result of a job's run, once it is there."""
        return self.results(job)[0]

    def results(self, job: PrefillJob, at_least: int = 1) -> list[JobResult]:
        """Every result of a job's run, once there are as many as wanted."""
        wait_until(
            lambda: len(self.results_so_far(job)) >= at_least, f"{at_least} results of job {job.item_id}", timeout_s=20
        )
        return self.results_so_far(job)

    def undisturbed_text(self, job: PrefillJob, weights: str = INSTANT) -> str:
        """What a single engine answers to this job's prompt, with no queue and no store in between."""
        engine = SimulatedEngine(parse_weights(weights), EngineOptions(weights))
        return engine.decode(engine.tokenize(job.prompt, 0.0).ids, None, job.sampling).text

    def refs(self, job: PrefillJob) -> list[BlockRef]:
        """Where this job's KV cache lies."""
        info = WatchedEngine().info
        prompt = WatchedEngine().tokenize(job.prompt, 0.0)
        assert info.layout is not None
        num_tokens = len(prompt.ids) - 1
        shared_tokens = shared_boundary(info.layout, min(prompt.shared_tokens, num_tokens))
        return block_refs(info.fingerprint, info.layout, prompt.ids, num_tokens, shared_tokens, job.job_id)

    def listen(self, batch_id: str) -> None:
        """Take this batch's results."""
        if batch_id not in self._replies:
            self._replies[batch_id] = Replies(self.broker, batch_id)

    def results_so_far(self, job: PrefillJob) -> list[JobResult]:
        """Every result that has arrived of a job's run."""
        self._receive_replies()
        return [result for result in self._results if (result.job_id, result.run) == (job.job_id, job.run)]

    def _receive_replies(self) -> None:
        for replies in self._replies.values():
            for reply in replies.receive(0):
                self._results.append(reply.result)
                reply.delivery.ack()

    # What lies where

    def steps(self, job: PrefillJob) -> list[Step]:
        """The steps of a job's run, as observed."""
        return [m.step for m in self.events if (m.job_id, m.facts.get("run", 1)) == (job.job_id, job.run)]

    def ready(self, queue: str) -> int:
        """Messages ready in a queue."""
        depth = self.broker.depth(queue)
        assert depth is not None, f"no queue {queue}"
        return depth.ready

    def lying_in(self, queue: str) -> list[Message]:
        """The messages ready in a queue. They stay there, but in a work queue each look counts as a return."""
        broker = EmbeddedBroker(self.server)
        messages = []
        while delivery := broker.get(queue):
            messages.append(delivery.message)
        broker.close()
        return messages

    def dead_letters(self, at_least: int = 1) -> list[Message]:
        """The graveyard, once so many are buried: a failed job is answered first."""
        wait_until(lambda: self.ready(topology.DEAD_LETTERS) >= at_least, f"{at_least} jobs are buried")
        return self.lying_in(topology.DEAD_LETTERS)

    def work_left(self) -> dict[str, int]:
        """Depth of each work, retry and death queue that is not empty."""
        ends = (topology.DEAD_LETTERS, topology.RESULTS_PARKED)
        names = [spec.name for spec in topology.queues([MODEL]) if spec.name not in ends]
        return {name: self.ready(name) for name in names if self.ready(name)}

    def nothing_is_left(self) -> None:
        """Wait until all work queues are empty and every worker has settled what it was given."""
        wait_until(lambda: not self.work_left(), "the work queues are empty")
        wait_until(lambda: not any(worker.broker.unacked for worker in self.workers), "everything is acked")


def work(stage: WorkerStage, lane: Any = "bulk") -> str:
    """Name of a work queue of the tests' model."""
    return topology.work_queue(stage, MODEL, lane)

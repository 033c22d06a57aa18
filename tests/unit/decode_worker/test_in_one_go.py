"""Quick jobs that are done in one go: each ends as it would by itself."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from infra import quick_jobs
from infra.broker import topology
from infra.broker.base import Address, Delivery
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.settle import Settler
from infra.quick_jobs import HELD_IF_INSTANT, HELD_IF_QUICK, QuickJobs, adaptive_prefetch
from infra.worker_loop import GroupHelp, SlotPool
from messages.errors import ContextExceeded, EngineUnavailable
from messages.jobs import PrefillJob
from messages.lifecycle import Step
from prefill_worker.worker import PrefillWorker
from tests.support.faults import drop
from tests.support.pipeline import MODEL, Gate, Pipeline, WatchedEngine, fails, work
from tests.support.waiting import wait_until


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        yield pipeline


class Clock:
    """What time it is for `quick_jobs`: it passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(quick_jobs, "time", clock)
    return clock


class Desk:
    """A worker whose station is not open: it is given deliveries by hand."""

    def __init__(self, pipeline: Pipeline, kind: type[PrefillWorker] | type[DecodeWorker], stage: str) -> None:
        self.engine = WatchedEngine(slots=1)
        self.broker = EmbeddedBroker(pipeline.server)
        args = (self.broker, pipeline.kv, pipeline.cluster_state, pipeline.observe)
        self.worker: PrefillWorker | DecodeWorker
        if kind is PrefillWorker:
            self.worker = PrefillWorker(MODEL, LoadedEngine(self.engine), *args, steps=self._steps)
        else:
            home = CachedModel(MODEL, 0, LoadedEngine(self.engine))
            self.worker = DecodeWorker(ModelCache(home), *args, steps=self._steps)
        self._queue = work("prefill" if kind is PrefillWorker else "decode")

    def _steps(self, *args: Any) -> QuickJobs[Any]:
        self.jobs = QuickJobs[Any](*args)
        return self.jobs

    def take(self, count: int) -> list[Delivery]:
        """Give it that many at once; returns when all are settled."""
        deliveries = [delivery for _ in range(count) if (delivery := self.broker.get(self._queue))]
        assert len(deliveries) == count
        self.jobs.accept_group(deliveries)
        self.worker._jobs.finish()
        return deliveries

    def close(self) -> None:
        self.broker.close()


@pytest.fixture
def decoder(pipeline: Pipeline) -> Iterator[Desk]:
    desk = Desk(pipeline, DecodeWorker, "decode")
    yield desk
    desk.close()


@pytest.fixture
def prefiller(pipeline: Pipeline) -> Iterator[Desk]:
    desk = Desk(pipeline, PrefillWorker, "prefill")
    yield desk
    desk.close()


def waiting(pipeline: Pipeline, count: int) -> list[PrefillJob]:
    """Jobs that wait to be decoded."""
    jobs = [pipeline.job(f"student {number}", shared_text="") for number in range(count)]
    prefill = pipeline.start_prefill()
    pipeline.submit(*jobs)
    wait_until(lambda: pipeline.ready(work("decode")) == count, "all wait to be decoded")
    pipeline.leave(prefill)
    return jobs


def test_all_are_decoded_each_to_its_own_text_and_nothing_is_left(pipeline: Pipeline, decoder: Desk) -> None:
    jobs = waiting(pipeline, 5)
    decoder.take(5)
    assert [pipeline.result(job).text for job in jobs] == [pipeline.undisturbed_text(job) for job in jobs]
    registration = decoder.worker.registration()
    assert len(decoder.engine.decode_calls) == registration.done == 5
    assert (registration.jobs, registration.busy) == ((), 0)
    pipeline.nothing_is_left()


def test_one_that_fails_costs_its_neighbours_nothing(pipeline: Pipeline, decoder: Desk) -> None:
    # Given three jobs, of which the second meets a passing error, and the third one that stays
    jobs = waiting(pipeline, 3)
    errors = iter([None, EngineUnavailable("for a moment"), ContextExceeded("for good")])

    def meets(_tokens: object, _stop: object) -> None:
        if error := next(errors):
            raise error

    decoder.engine.before_decode = meets
    # When they are decoded in one go
    decoder.take(3)
    # Then the first has its answer, the second waits for its next attempt, and the third is a dead letter
    assert pipeline.result(jobs[0]).state == "succeeded"
    assert pipeline.result(jobs[2]).state == "failed"
    assert Step.RETRIED in pipeline.steps(jobs[1])
    assert pipeline.results_so_far(jobs[1]) == []


def test_what_has_its_result_is_answered_with_it_and_what_another_worker_holds_is_left(
    pipeline: Pipeline, decoder: Desk
) -> None:
    jobs = waiting(pipeline, 3)
    pipeline.cluster_state.claim(jobs[1].job_id, 1, "somebody-else", ttl_s=60)
    decoder.take(3)
    assert len(decoder.engine.decode_calls) == 2
    assert pipeline.result(jobs[0]).state == pipeline.result(jobs[2]).state == "succeeded"
    assert pipeline.results_so_far(jobs[1]) == []


def test_those_behind_a_slow_one_go_back_and_those_before_it_are_answered(
    pipeline: Pipeline, decoder: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_jobs, "GROUP_PATIENCE_S", 0.0)
    jobs = waiting(pipeline, 3)
    decoder.take(3)
    # The first one was begun in any case
    assert pipeline.result(jobs[0]).state == "succeeded"
    assert pipeline.ready(work("decode")) == 2
    assert pipeline.results_so_far(jobs[1]) == pipeline.results_so_far(jobs[2]) == []


def test_one_that_goes_back_is_anybodys_once_its_copy_is_there(
    pipeline: Pipeline, decoder: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job behind a slow one
    monkeypatch.setattr(quick_jobs, "GROUP_PATIENCE_S", 0.0)
    first, second = waiting(pipeline, 2)
    running: list[tuple[str, ...]] = []
    hand_back_all = decoder.worker._settler.hand_back_all

    def note(deliveries: list[Delivery]) -> None:
        running.append(decoder.worker.registration().jobs)
        assert pipeline.cluster_state.claim(second.job_id, 1, "somebody-else", ttl_s=60)
        hand_back_all(deliveries)

    monkeypatch.setattr(decoder.worker._settler, "hand_back_all", note)
    # When it goes back
    decoder.take(2)
    # Then a delivery of its copy would not be taken for one of an attempt here, and somebody else could claim it
    assert running in ([(first.job_id,)], [()])
    assert pipeline.ready(work("decode")) == 1


def test_a_batch_that_is_cancelled_meanwhile_is_not_decoded_on(pipeline: Pipeline, decoder: Desk) -> None:
    # Given three jobs in one go, the first of which is in the engine
    waiting(pipeline, 3)
    decoder.engine.before_decode = gate = Gate()
    deliveries = [delivery for _ in range(3) if (delivery := decoder.broker.get(work("decode")))]
    decoder.jobs.accept_group(deliveries)
    gate.wait()
    # When their batch is cancelled
    pipeline.client.cancel(deliveries[0].message.correlation_id)
    decoder.worker.on_cancel(deliveries[0].message.correlation_id)
    gate.open()
    decoder.worker._jobs.finish()
    # Then none of them was answered, and none waits
    pipeline.nothing_is_left()
    assert [event.step for event in pipeline.events].count(Step.ANSWERED) == 0


def test_prompts_behind_a_slow_one_go_back_too(
    pipeline: Pipeline, prefiller: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_jobs, "GROUP_PATIENCE_S", 0.0)
    pipeline.submit(*(pipeline.job(f"student {number}", shared_text="") for number in range(3)))
    prefiller.take(3)
    assert (pipeline.ready(work("decode")), pipeline.ready(work("prefill"))) == (1, 2)


def test_short_prompts_do_not_wait_for_a_large_one_behind_them(pipeline: Pipeline, prefiller: Desk) -> None:
    # Given two short prompts and a large one in one go
    jobs = [pipeline.job(f"student {number}", shared_text="") for number in range(2)]
    pipeline.submit(*jobs, pipeline.job("large " * 2700, shared_text=""))
    gate = Gate()
    prefiller.engine.before_prefill = lambda tokens, stop: gate(tokens, stop) if len(tokens) > 1000 else None
    going = threading.Thread(target=prefiller.take, args=(3,))
    going.start()
    # When the large one is being computed
    gate.wait()
    # Then the short ones are on their way already
    wait_until(lambda: pipeline.ready(work("decode")) == 2, "the short ones wait to be decoded")
    gate.open()
    going.join(10)
    assert pipeline.ready(work("decode")) == 3


def test_a_prompt_that_fails_costs_its_neighbours_nothing(pipeline: Pipeline, prefiller: Desk) -> None:
    jobs = [pipeline.job(f"student {number}", shared_text="") for number in range(3)]
    pipeline.submit(*jobs)
    prefiller.engine.before_prefill = fails(ContextExceeded("for good"))
    prefiller.take(3)
    assert pipeline.ready(work("decode")) == 2
    assert pipeline.result(jobs[0]).state == "failed"


def test_more_is_held_the_quicker_the_jobs_are_and_a_level_is_left_later_than_it_is_entered() -> None:
    assert [adaptive_prefetch(mean_s, 1) for mean_s in (1.0, 0.051, 0.049, 0.0051, 0.0049)] == [
        1,
        1,
        HELD_IF_QUICK,
        HELD_IF_QUICK,
        HELD_IF_INSTANT,
    ]
    assert adaptive_prefetch(0.06, HELD_IF_QUICK) == HELD_IF_QUICK
    assert adaptive_prefetch(0.11, HELD_IF_QUICK) == 1
    assert adaptive_prefetch(0.009, HELD_IF_INSTANT) == HELD_IF_INSTANT
    assert adaptive_prefetch(0.06, HELD_IF_INSTANT) == HELD_IF_QUICK


def test_jobs_count_as_quick_after_several_and_no_more_after_a_slow_one(pipeline: Pipeline, clock: Clock) -> None:
    # Given a worker that has measured nothing yet, and jobs of a millisecond
    pipeline.submit(*(pipeline.job(f"student {number}", shared_text="") for number in range(60)))
    broker, done, job_s = EmbeddedBroker(pipeline.server), 0, 0.001

    def handle(delivery: Delivery, _leave: object) -> None:
        nonlocal done
        clock.now += job_s
        done += 1
        delivery.ack()

    settler = Settler(broker, [MODEL], pipeline.observe)
    jobs = QuickJobs[None](broker, settler, SlotPool(1, inline=True), handle, lambda _: None)
    consumer = jobs.consume(work("prefill"), 1)
    # When they are done
    held: dict[int, int] = {}
    while done < 45:
        delivery = consumer.receive(1)
        assert delivery
        held.setdefault(consumer.at_once, done)
        jobs.accept(delivery)
    # Then more are held after so many that one slow job among them would have been noticed
    assert list(held) == [1, HELD_IF_QUICK, HELD_IF_INSTANT]
    assert (held[1], held[HELD_IF_QUICK]) == (0, 7)
    assert 31 <= held[HELD_IF_INSTANT] < 40
    # And after a slow one all that is held but one goes back
    job_s = 3.0
    delivery = consumer.receive(1)
    assert delivery
    jobs.accept_group([delivery])
    assert consumer.receive(1)
    assert (consumer.at_once, pipeline.ready(work("prefill"))) == (1, 60 - done - 1)
    jobs.close()
    broker.close()


def test_a_large_job_that_comes_alone_lets_go_of_those_behind_it(pipeline: Pipeline, clock: Clock) -> None:
    # Given jobs so quick that many are held, and not so quick that they go together; one of them is large
    submitted = [pipeline.job(f"student {number}", shared_text="") for number in range(20)]
    submitted[15] = pipeline.job("large " * 4000, shared_text="")
    pipeline.submit(*submitted)
    broker = EmbeddedBroker(pipeline.server)
    held: list[int] = []

    def handle(delivery: Delivery, _leave: object) -> None:
        held.append(consumer.at_once)
        clock.now += 0.02
        delivery.ack()

    settler = Settler(broker, [MODEL], pipeline.observe)
    jobs = QuickJobs[None](broker, settler, SlotPool(1, inline=True), handle, lambda _: None)
    consumer = jobs.consume(work("prefill"), 1)
    # When it is begun, then those behind it are anybody's, but for the one that is pushed again
    while len(held) < 16:
        delivery = consumer.receive(1)
        assert delivery
        jobs.accept(delivery)
    assert held[14:] == [HELD_IF_QUICK, 1]
    assert pipeline.ready(work("prefill")) == 3
    settler.hand_back_all(consumer.close())
    jobs.close()
    broker.close()


def test_what_lies_behind_a_slow_job_for_a_second_goes_back(pipeline: Pipeline, clock: Clock) -> None:
    # Given jobs that were quick so far, and one in the only slot
    pipeline.submit(*(pipeline.job(f"student {number}", shared_text="") for number in range(5)))
    broker, ends = EmbeddedBroker(pipeline.server), [threading.Event(), threading.Event()]
    going = iter(ends)
    settler = Settler(broker, [MODEL], pipeline.observe)
    jobs = QuickJobs[None](
        broker,
        settler,
        SlotPool(1),
        lambda delivery, _leave: (next(going).wait(10), delivery.ack())[1],
        lambda _: None,
        GroupHelp(lambda: 0.03),
    )
    consumer = jobs.consume(work("prefill"), 1)

    def begin() -> None:
        delivery = consumer.receive(1)
        assert delivery
        assert consumer.at_once == HELD_IF_QUICK
        jobs.accept(delivery)
        assert not jobs.wait(0)

    begin()
    # When it takes nearly a second, then they stay
    clock.now += 0.9
    assert not jobs.wait(0)
    assert pipeline.ready(work("prefill")) == 0
    # When another takes as long after it, they stay too: it is a new second
    ends[0].set()
    assert jobs.wait(10)
    begin()
    clock.now += 0.9
    assert not jobs.wait(0)
    assert (consumer.at_once, pipeline.ready(work("prefill"))) == (HELD_IF_QUICK, 0)
    # When it takes longer, all but the one that is pushed again go back
    clock.now += 0.2
    assert not jobs.wait(0)
    assert (consumer.at_once, pipeline.ready(work("prefill"))) == (1, 2)
    ends[1].set()
    settler.hand_back_all(consumer.close())
    jobs.close()
    broker.close()


@pytest.mark.parametrize(("mean_s", "together"), [(0.0001, HELD_IF_QUICK), (0.004, 4), (0.015, 1), (5.0, 1)])
def test_as_many_go_together_as_are_done_in_one_go(pipeline: Pipeline, mean_s: float, together: int) -> None:
    pipeline.submit(*(pipeline.job(f"student {number}", shared_text="") for number in range(40)))
    broker = EmbeddedBroker(pipeline.server)
    groups: list[list[Delivery]] = []

    def looked_up(group: list[Delivery]) -> AbstractContextManager[None]:
        groups.append(group)
        return nullcontext()

    jobs = QuickJobs[None](
        broker,
        Settler(broker, [MODEL], pipeline.observe),
        SlotPool(1, inline=True),
        lambda *_: None,
        lambda _: None,
        GroupHelp(lambda: mean_s, looked_up),
    )
    consumer = jobs.consume(work("prefill"), 1)
    first = consumer.receive(1)
    assert first
    jobs.accept(first)
    assert [len(group) for group in groups] == ([together] if together > 1 else [])
    jobs.close()
    broker.close()


def test_one_that_came_back_is_done_by_itself(pipeline: Pipeline) -> None:
    # Given jobs of which the second was taken back from somebody
    pipeline.submit(*(pipeline.job(f"student {number}", shared_text="") for number in range(4)))
    crashing = pipeline.new_broker()
    taken = [crashing.get(work("prefill")) for _ in range(4)]
    drop(crashing)
    for delivery in [crashing.get(work("prefill")) for _ in range(4)]:
        assert delivery
        if delivery.message.message_id != taken[1].message.message_id:  # type: ignore[union-attr]
            pipeline.broker.publish(Address(topology.WORK, work("prefill")), delivery.message)
            delivery.ack()
    drop(crashing)
    # When all have arrived at a worker whose jobs are quick
    broker = EmbeddedBroker(pipeline.server)
    settler, groups = Settler(broker, [MODEL], pipeline.observe), list[list[Delivery]]()
    jobs = QuickJobs[None](
        broker,
        settler,
        SlotPool(1, inline=True),
        lambda delivery, _leave: [group.append(delivery) for group in groups[-1:]],
        lambda _: None,
        GroupHelp(lambda: 0.0001),
    )
    monkey = jobs.accept_group
    jobs.accept_group = lambda group: (groups.append([]), monkey(group))  # type: ignore[assignment,func-returns-value]
    consumer = jobs.consume(work("prefill"), 4)
    while delivery := consumer.receive(0):
        jobs.accept(delivery)
    # Then nothing is beside it
    sizes = [(len(group), any(delivery.returns for delivery in group)) for group in groups]
    assert (1, True) in sizes
    assert sum(size for size, _ in sizes) == 4
    assert not any(came_back and size > 1 for size, came_back in sizes)
    jobs.close()
    broker.close()


def test_while_the_engine_is_away_a_job_goes_back_before_anything_is_done_for_it(
    pipeline: Pipeline, prefiller: Desk, decoder: Desk
) -> None:
    # Given a job for each stage
    (prefilled,) = waiting(pipeline, 1)
    unprefilled = pipeline.job("student 2", shared_text="")
    pipeline.submit(unprefilled)

    # When they come to workers whose engines are away
    prefiller.engine.outage = decoder.engine.outage = "its program died"
    pipeline.kv.failing_calls = {"get", "put", "missing"}  # whoever asks the store finds out, and goes on without
    prefiller.take(1)
    decoder.take(1)

    # Then they wait for somebody else, and nothing was tokenized, fetched or counted
    assert (pipeline.ready(work("prefill")), pipeline.ready(work("decode"))) == (1, 1)
    assert (prefiller.engine.tokenize_calls, decoder.engine.decode_calls, pipeline.kv.refusals) == (0, [], 0)
    assert Step.PREFILL_STARTED not in pipeline.steps(unprefilled)
    assert Step.DECODE_STARTED not in pipeline.steps(prefilled)

    # and are answered once somebody is there
    pipeline.kv.failing_calls = set()
    pipeline.start()
    assert {pipeline.result(job).attempts for job in (unprefilled, prefilled)} == {1}

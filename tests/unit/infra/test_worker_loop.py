"""A worker's place at the broker: what it takes first, what it hears, and the deaths that it answers."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import msgpack
import pytest

from infra.broker import topology
from infra.broker.base import Address, Delivery, Message
from infra.broker.control import announce_cancel, announce_pause, ring
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from infra.broker.envelope import Attempt, Envelope, open_envelope
from infra.broker.settle import Settler, replying
from infra.checks import Checks
from infra.config.hours import Hours
from infra.worker_loop import ConsumerLoop, JobSource
from messages import codec
from messages.errors import Poison, Stopped
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from messages.lifecycle import Step
from messages.workers import ENGINE_AWAY, SELF_PAUSED, WorkerStage, prefill_id
from tests.support.pipeline import MODEL, Pipeline, work
from tests.support.waiting import wait_until


class Desk:
    """Jobs and a handler, with one slot: it notes what it is given, and holds it until told to settle."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.cancelled: list[str] = []
        self.ticks = 0
        self.slot = threading.Semaphore(1)
        self._held: list[Delivery] = []

    def wait(self, timeout_s: float) -> bool:
        if not self.slot.acquire(timeout=timeout_s):
            return False
        self.slot.release()
        return True

    def count_in_progress(self) -> int:
        return len(self._held)

    def accept(self, delivery: Delivery) -> None:
        self.slot.acquire()
        self._held.append(delivery)
        self.taken.append(delivery.message.message_id)

    def settle(self) -> None:
        """Done with what is held."""
        self._held.pop().ack()
        self.slot.release()

    def finish(self) -> None:
        while self._held:
            self.settle()

    close = finish

    def has_room(self) -> bool:
        return True

    def on_cancel(self, batch_id: str) -> None:
        self.cancelled.append(batch_id)

    def tick(self) -> None:
        self.ticks += 1


class ShiftHours(Hours):
    """Hours that begin and end when told to."""

    begun = True

    def include(self, _moment: datetime) -> bool:
        return self.begun


class PushedOneByOne:
    """The plainest flow: the broker pushes one delivery."""

    def __init__(self, broker: EmbeddedBroker, bulk: str) -> None:
        self._consumer = broker.consume(bulk, 1)
        self.pauses = 0
        self.close = self._consumer.close
        self.nudge = self._consumer.nudge

    def next(self, timeout_s: float) -> Delivery | None:
        self._consumer.resume()
        return self._consumer.receive(timeout_s)

    def throttle(self, _urgent: object) -> None:
        """It holds what it holds."""

    def pause(self) -> list[Delivery]:
        self.pauses += 1
        return self._consumer.pause()


class Site:
    """A broker, and a station with a desk."""

    def __init__(self, server: EmbeddedServer | None = None, stage: WorkerStage = "decode", name: str = "me") -> None:
        self.server = server or EmbeddedServer()
        self.broker = EmbeddedBroker(self.server)
        self.broker.declare([MODEL])
        self.stations_broker = EmbeddedBroker(self.server)
        self.desk = Desk()
        self.hours = ShiftHours()
        settler = Settler(self.stations_broker, [MODEL], lambda _: None)
        self.away = ""
        self._bulk = work(stage)
        self.station = ConsumerLoop(
            self.stations_broker, settler, stage, MODEL, name, self.open_flow, lambda: self.away
        )
        self._thread = threading.Thread(target=self.station.run, args=(self.desk, self.desk, self.hours), daemon=True)

    def open_flow(self) -> PushedOneByOne:
        self.flow = PushedOneByOne(self.stations_broker, self._bulk)
        return self.flow

    def open(self) -> None:
        self._thread.start()
        wait_until(lambda: self.desk.ticks, "the station is open")

    def close(self) -> None:
        self.station.stop()
        ring(self.broker, "nothing")
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.stations_broker.close()

    def put(self, name: str, queue: str, headers: dict[str, int] | None = None) -> None:
        self.broker.publish(Address(topology.WORK, queue), Message(b"", name, headers=headers or {}))

    def took(self, *names: str) -> None:
        wait_until(lambda: self.desk.taken == list(names), f"{names} were taken, in this order")


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    if site._thread.is_alive():
        site.close()


NOW, BULK, SUSPECTS = work("decode", "now"), work("decode"), topology.suspects_queue("decode", MODEL)


def test_the_now_lane_goes_first_and_bulk_in_the_order_it_came(site: Site) -> None:
    for name in ("bulk-1", "bulk-2"):
        site.put(name, BULK)
    site.put("now", NOW)

    site.open()

    site.took("now")
    site.desk.settle()
    site.took("now", "bulk-1")
    site.desk.settle()
    site.took("now", "bulk-1", "bulk-2")


def test_no_job_is_taken_once_its_hours_have_ended_and_a_pause_outlasts_them(site: Site, monkeypatch) -> None:
    site.open()
    assert site.station.idle_reason == ""
    monkeypatch.setattr(ShiftHours, "begun", False)
    wait_until(lambda: site.station.idle_reason == "outside its hours" and site.flow.pauses, "its hours have ended")

    site.put("bulk", BULK)
    announce_pause(site.broker, "me", should_pause=True)
    wait_until(lambda: site.station.idle_reason == "paused", "it is paused")
    ticks = site.desk.ticks
    monkeypatch.setattr(ShiftHours, "begun", True)
    wait_until(lambda: site.desk.ticks > ticks + 1, "it has looked at the clock")
    assert (site.station.idle_reason, site.desk.taken) == ("paused", [])

    announce_pause(site.broker, "me", should_pause=False)
    site.took("bulk")


class CongestedBroker(EmbeddedBroker):
    """A broker to which nothing gets through while its `way` is blocked; it is connected all the while."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__(server)
        self.way = threading.Event()
        self.connected = True
        self.way.set()

    def publish(self, to: Address, message: Message, timeout_s: float | None = 30.0) -> None:
        if to.exchange == topology.REPLY:
            self.way.wait()
        super().publish(to, message, timeout_s)

    @property
    def is_connected(self) -> bool:
        return self.connected


def test_a_worker_whose_results_do_not_leave_pauses_itself_until_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.worker_loop._LATE_S", 0.3)
    monkeypatch.setattr("tests.unit.infra.test_worker_loop.EmbeddedBroker", CongestedBroker)
    site = Site()
    way = site.stations_broker
    assert isinstance(way, CongestedBroker)
    site.open()
    site.broker.open_reply_queue("b")
    result = JobResult("job", 1, "b", "i", MODEL, "expired")
    envelope = Envelope("job", "b", "i", MODEL, "decode", reply_to=topology.reply_queue("b"))
    sending = threading.Thread(target=site.station._settler.settle, args=[replying(Attempt([], envelope), result)])

    # When its result is late, but because the broker is away: then that is no fault of this worker
    way.way.clear()
    way.connected = False
    sending.start()
    time.sleep(1.2)  # more than two looks
    assert site.station.idle_reason == ""
    # When the broker is there and the result stays on its way
    way.connected = True
    wait_until(lambda: site.station.idle_reason == SELF_PAUSED, "it has paused itself")
    wait_until(lambda: site.flow.pauses, "it holds nothing")
    site.put("bulk", BULK)
    assert "has not confirmed" in site.station.paused_because
    assert site.desk.taken == []
    # Then it goes on by itself once that has left
    way.way.set()
    site.took("bulk")
    assert (site.station.idle_reason, site.station.paused_because) == ("", "")
    sending.join()
    site.close()


def test_no_job_is_taken_or_held_while_the_engine_is_away_and_the_next_one_as_soon_as_it_is_back(site: Site) -> None:
    # Given a worker that holds a job which it has not begun
    for name in ("begun", "held"):
        site.put(name, BULK)
    site.open()
    site.took("begun")
    # When its engine goes away
    site.away = "its server does not answer"
    wait_until(lambda: site.flow.pauses, "it has noticed")
    assert site.station.idle_reason == ENGINE_AWAY
    # Then what is not begun is there for others, and nothing more is taken, of either lane
    site.put("urgent", NOW)
    ring(site.broker, NOW)
    site.desk.settle()
    ticks = site.desk.ticks
    wait_until(lambda: site.desk.ticks > ticks + 1, "time has passed")
    assert site.desk.taken == ["begun"]
    assert [site.broker.depth(queue).ready for queue in (NOW, BULK)] == [1, 1]  # type: ignore[union-attr]
    # And it goes on by itself
    site.away = ""
    wait_until(lambda: "urgent" in site.desk.taken, "it goes on")
    assert site.station.idle_reason == ""


def test_wakeups_which_come_as_often_as_jobs_cause_no_more_ticks(site: Site) -> None:
    site.open()
    began, before = time.monotonic(), site.desk.ticks
    for _ in range(200):
        ring(site.broker, NOW)
    announce_cancel(site.broker, "the last that it hears")
    wait_until(lambda: site.desk.cancelled, "it has heard all of it")
    assert site.desk.ticks - before <= 2 + 2 * (time.monotonic() - began)


def test_a_full_worker_is_given_no_more_than_its_prefetch(site: Site) -> None:
    for number in range(5):
        site.put(f"bulk-{number}", BULK)

    site.open()
    site.took("bulk-0")

    depth = site.broker.depth(BULK)
    assert depth is not None
    assert depth.ready == 4


def test_work_that_comes_to_an_idle_station_is_taken_from_both_lanes(site: Site) -> None:
    site.open()

    site.put("now", NOW)
    ring(site.broker, NOW)
    site.took("now")
    site.desk.settle()
    site.put("bulk", BULK)
    site.took("now", "bulk")


def test_a_suspect_is_taken_only_by_a_station_that_holds_nothing(site: Site) -> None:
    site.put("bulk-1", BULK)
    site.put("suspect", SUSPECTS)

    site.open()  # the suspect is first: nothing is held yet
    site.took("suspect", "bulk-1")


def test_where_it_is_looked_for_jobs_and_how_often(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a source of deliveries, one of which is being worked on, and urgent jobs and suspects
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now, sleep=lambda _s: None)
    monkeypatch.setattr("infra.worker_loop.time", clock)
    held = 1
    source = JobSource(site.broker, "decode", MODEL, PushedOneByOne(site.broker, BULK), lambda: held)

    def names() -> list[str]:
        """What comes now, until nothing does."""
        deliveries = list(iter(lambda: source.next(0), None))
        for delivery in deliveries:
            delivery.ack()
        return [delivery.message.message_id for delivery in deliveries]

    for name in ("1", "2"):
        site.put(f"suspect-{name}", SUSPECTS)
        site.put(f"now-{name}", NOW)
    # Then the urgent ones are found one after the other, and the suspects when nothing else is held
    assert names() == ["now-1", "now-2"]
    held = 0
    assert names() == ["suspect-1", "suspect-2"]
    # What comes after that is not looked for at once, but soon
    site.put("now-3", NOW)
    site.put("another suspect", SUSPECTS)
    assert names() == []
    clock.now += 0.3
    assert names() == ["now-3"]
    clock.now += 1.6
    assert names() == []
    clock.now += 0.2
    assert names() == ["another suspect"]
    # And an urgent one that rings at once; who rings for another queue is not heard
    clock.now += 0.3
    assert names() == []
    site.put("now-4", NOW)
    source.ring(BULK)
    assert names() == []
    source.ring(NOW)
    assert names() == ["now-4"]
    # While the broker is away nothing comes, and that is all
    clock.now += 0.3
    site.broker.close()
    assert names() == []


def test_where_jobs_wait_and_none_comes_for_long_it_listens_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a station that looks after its queues all the time, and a subscription that the broker has lost
    monkeypatch.setattr("infra.worker_loop._DEATHS_EVERY_S", 0.0)
    site.open()
    receive = site.flow.next
    site.flow.next = lambda timeout_s: time.sleep(timeout_s)  # type: ignore[method-assign,assignment,return-value]
    site.flow.pause()
    pauses = site.flow.pauses
    site.put("bulk", BULK)
    # When not much time has passed, then it waits
    ticks = site.desk.ticks
    wait_until(lambda: site.desk.ticks > ticks + 1, "it has looked")
    assert site.flow.pauses == pauses
    # When it has, then what it listens to is left and begun again
    monkeypatch.setattr("infra.worker_loop._FORGOTTEN_S", 0.0)
    wait_until(lambda: site.flow.pauses > pauses, "it listens again")
    site.flow.next = receive  # type: ignore[method-assign]
    site.took("bulk")


def test_what_was_not_begun_when_a_station_stops_is_handed_back_uncounted(site: Site) -> None:
    # Given a station whose slot is taken from the now lane while it was given one of the bulk
    site.put("now", NOW)
    site.put("bulk", BULK)
    site.open()
    site.took("now")
    wait_until(lambda: len(site.stations_broker.unacked) == 2, "it was given the other too")

    # When it stops
    site.close()

    # Then the one in the slot was finished, and the other lies in its queue as if never touched
    assert site.desk.taken == ["now"]
    back = site.broker.get(BULK)
    assert back is not None
    assert (back.message.message_id, back.returns, "kvasir-returns" in back.message.headers) == ("bulk", 0, False)


# Both roles in one process


@pytest.fixture
def prefill(site: Site) -> Iterator[Site]:
    """The other role of the site's process."""
    prefill = Site(site.server, "prefill", prefill_id("me"))
    prefill.station.pair_with(site.station)
    yield prefill
    prefill.close()


class HeldUp:
    """A function that waits before it returns."""

    def __init__(self, function: Callable[..., Delivery | None]) -> None:
        self._function = function
        self.called, self.released = threading.Event(), threading.Event()

    def __call__(self, *arguments: object) -> Delivery | None:
        found = self._function(*arguments)
        if found:
            self.called.set()
            assert self.released.wait(10)
        return found


def test_a_suspect_waits_for_what_the_other_role_is_just_being_given(
    site: Site, prefill: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a prefill role that has been brought a job, and has not begun it
    flow = prefill.open_flow()
    giving = HeldUp(flow.next)
    monkeypatch.setattr(flow, "next", giving)
    monkeypatch.setattr(prefill.station, "_open_flow", lambda: flow)
    prefill.put("prompt", work("prefill"))
    prefill.open()
    assert giving.called.wait(10)
    # When the decode role takes a suspect
    site.put("suspect", SUSPECTS)
    site.open()
    wait_until(site.station._alone.locked, "the suspect is here")
    giving.released.set()
    prefill.took("prompt")
    threading.Event().wait(0.5)
    # Then it begins only once that job is done
    assert site.desk.taken == []
    prefill.desk.settle()
    site.took("suspect")


def test_of_two_suspects_one_goes_back(site: Site, prefill: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a prefill role that has been brought a suspect, and has not begun it
    suspects = topology.suspects_queue("prefill", MODEL)
    getting = HeldUp(prefill.stations_broker.get)
    monkeypatch.setattr(prefill.stations_broker, "get", getting)
    prefill.put("its-suspect", suspects)
    prefill.open()
    assert getting.called.wait(10)
    # When the decode role takes one, too
    ended = threading.Event()
    monkeypatch.setattr(site.desk, "finish", lambda: ended.wait(10) and site.desk.settle())
    site.put("suspect", SUSPECTS)
    site.open()
    wait_until(site.station._alone.locked, "both have one")
    getting.released.set()
    # Then only one runs, and the other lies in its queue meanwhile, as if never touched
    site.took("suspect")
    assert prefill.desk.taken == []
    depth = site.broker.depth(suspects)
    assert depth
    assert (depth.ready, prefill.stations_broker.unacked) == (1, set())
    ended.set()
    prefill.took("its-suspect")


def test_what_a_full_role_may_have_been_given_ahead_is_not_kept_from_others(site: Site) -> None:
    # Given a role that shall take nothing of its bulk
    site.station.wants_bulk = lambda: False
    site.open()
    wait_until(lambda: site.flow.pauses == 1, "it holds nothing")
    # When its slot is taken, and free again: what the flow looked for meanwhile is for that slot
    site.put("now", NOW)
    ring(site.broker, NOW)
    site.took("now")
    threading.Event().wait(0.3)
    site.desk.settle()
    # Then it lets go of that
    wait_until(lambda: site.flow.pauses == 2, "it holds nothing again")


# Broadcasts


def test_a_cancel_reaches_every_station_and_nonsense_hurts_none(site: Site) -> None:
    site.open()

    nonsense = [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb({"cancel": 5}), msgpack.packb({"dance": "now"})]
    for body in nonsense:
        site.broker.publish_lossy(Address(topology.CONTROL, ""), Message(body))
    announce_cancel(site.broker, "a-batch")

    wait_until(lambda: site.desk.cancelled == ["a-batch"], "the cancel is heard")


# Suspects and poison


@pytest.mark.parametrize(("crashes", "why"), [(0, ""), (2, ""), (3, "suspect"), (4, "suspect")])
def test_a_job_that_three_workers_fell_with_runs_alone(site: Site, crashes: int, why: str) -> None:
    assert _why_not_begun(site, BULK, crashes) == why


def test_a_suspect_in_its_own_queue_is_run_and_given_up_after_two_more_crashes(site: Site) -> None:
    assert _why_not_begun(site, SUSPECTS, 4) == ""
    with pytest.raises(Poison, match="5 workers died while they ran this job"):
        _why_not_begun(site, SUSPECTS, 5)


def _why_not_begun(site: Site, queue: str, crashes: int) -> str:
    """Why a job is not begun with which so many workers have crashed; "": it is."""
    job = PrefillJob("a-job", "a-batch", "an-item", MODEL, user_prompt("", "hi"), Sampling(8))
    site.broker.publish(Address(topology.WORK, queue), Message(codec.encode(job), "a-job"))
    delivery = site.broker.get(queue)
    assert delivery is not None
    attempt = Attempt[PrefillJob]([delivery], open_envelope(delivery, "prefill", MODEL))
    delivery.ack()
    checks = Checks(lambda _batch_id: False, lambda: 0.0, lambda *_run: nullcontext(crashes))
    try:
        with checks.passed(attempt):
            pass
    except Stopped:
        return attempt.why_stopped
    return ""


# Deaths made by the broker


def given_up(pipeline: Pipeline, queue: str) -> None:
    """Have a message returned until the broker gives it up."""
    while pipeline.ready(queue):
        crashing = pipeline.new_broker()
        crashing.get(queue)
        crashing.close()
    assert pipeline.ready(topology.DEATHS) == 1


def test_a_job_that_the_broker_gives_up_is_answered_and_buried() -> None:
    with Pipeline() as pipeline:
        # Given a job that came back more often than the broker's limit allows
        job = pipeline.job()
        pipeline.submit(job)
        given_up(pipeline, work("prefill"))

        # When a worker comes up, of whatever stage
        pipeline.start_decode()

        # Then the job has its failed result, and lies in the graveyard
        result = pipeline.result(job)
        assert result.error is not None
        assert (result.state, result.error.stage, result.error.kind) == ("failed", "prefill", "Poison")
        assert result.error.message == "the broker gave the job up, because it came back more than 20 times"
        assert [letter.message_id for letter in pipeline.dead_letters()] == [job.job_id]
        pipeline.nothing_is_left()
        assert pipeline.steps(job) == [Step.SUBMITTED, Step.FAILED]


@pytest.mark.parametrize("model", ["no model at all", "", 7])
def test_a_death_with_an_absurd_model_is_buried_and_housekeeping_goes_on(model: str | int) -> None:
    with Pipeline() as pipeline:
        pipeline.start_decode()
        death = Message(b"?", "a-job", "a-batch", "reply.a-batch", {"kvasir-model": model})
        pipeline.broker.publish(Address(topology.DEAD, topology.DEATHS), death)
        pipeline.start_prefill()  # a new station looks at once

        assert len(pipeline.dead_letters()) == 1
        assert pipeline.ready(topology.RESULTS_PARKED) == 1


def test_housekeeping_outlives_a_missing_queue(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a station that looks for deaths all the time, and a queue of deaths that somebody deleted
    monkeypatch.setattr("infra.worker_loop._DEATHS_EVERY_S", 0.0)
    site.open()
    site.server.delete_queue(topology.DEATHS)
    seen = site.desk.ticks
    wait_until(lambda: site.desk.ticks >= seen + 2, "it has looked there, and goes on")

    # When something else happens, then it is heard
    announce_cancel(site.broker, "a-batch")

    wait_until(lambda: site.desk.cancelled == ["a-batch"], "the cancel is heard")


@pytest.mark.parametrize("queue", [NOW, BULK, SUSPECTS])
def test_a_queue_that_somebody_deleted_is_declared_again_and_served(
    site: Site, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    # Given a station that looks after its queues all the time
    monkeypatch.setattr("infra.worker_loop._DEATHS_EVERY_S", 0.0)
    site.open()

    # When somebody deletes one, and the one of parked results
    for name in (queue, topology.RESULTS_PARKED):
        site.server.delete_queue(name)
        wait_until(partial(site.server.depth, name), "the queue is there again")

    # Then what is put there is taken
    site.put("after", queue)
    site.took("after")

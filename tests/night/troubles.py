"""What happens in a night, one thing after the other in an order by seed, and how long until work went on."""

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import httpx

from tests.acceptance.faults.catalogue import _DISK
from tests.night.books import planned_jobs
from tests.night.courses import READER, WRITER, Course
from tests.night.desk import Desk
from tests.night.evening import Endpoint
from tests.night.record import Record
from tests.night.site import Hand, Site, journal_lines, seconds_of, wait_for_disk
from tests.support.processes import ProcessRole, RunningProcess
from tests.support.waiting import wait_until

PATIENCE_S = 240.0
_ASLEEP_S = 10.0  # more than two heartbeats
_AWAY_S = 4.0
_LOOK_S = 0.5
_SETTLED_S = 30.0


class Alerts:
    """Which alerts fire when, looked at twice a second: use as a context manager."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.seen: list[tuple[float, str]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join(10)

    def since(self, start: float) -> list[str]:
        """Names of those that fired, and had not before."""
        looks = list(self.seen)
        last = max((at for at, _ in looks if at < start), default=0.0)
        old_names = {name for at, name in looks if last - 0.1 <= at < start and start - at < _LOOK_S * 3}
        return sorted({name for at, name in looks if at >= start} - old_names)

    def firing(self) -> list[str]:
        """Names of those that fire now."""
        return sorted(self._site.prometheus.firing())

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            with suppress(httpx.HTTPError):
                self.seen += [(time.time(), name) for name in self.firing()]


@dataclass(slots=True)
class Night:
    """Whom troubles meet."""

    site: Site
    courses: Sequence[Course]
    endpoint: Endpoint
    record: Record
    alerts: Alerts
    random: random.Random
    desk: Desk | None = None
    fixed: float = 0.0  # when what lasts as long as the harness wants was over, since the epoch
    fast: Hand | None = None  # a worker that joins at the end
    went_on: float = 0.0  # when work last went on after a wait for it, since the epoch

    def results(self) -> int:
        """Lines in all journals."""
        return len(journal_lines([course.out for course in self.courses]))

    def open_courses(self) -> list[Course]:
        """Those whose owner still waits for results."""
        return [course for course in self.courses if self.site.owners[course.title].alive]

    def busiest_course(self) -> Course:
        """The one that waits for the most results: in another's journal the next one may be long in coming."""
        courses = [
            course for course in self.open_courses() if isinstance(self.site.owners[course.title], RunningProcess)
        ]
        return max(courses, key=lambda course: len(planned_jobs(course)) - len(journal_lines([course.out])))

    def wait(self, condition: Callable[[], object], description: str) -> None:
        """Until something has gone on."""
        wait_until(condition, description, PATIENCE_S, poll_s=0.1)
        self.went_on = time.time()

    def wait_for_a_result(self) -> None:
        """Until one more is in a journal, or none is open any more."""
        count = self.results()
        self.wait(lambda: self.results() > count or not self.open_courses(), "a result comes")

    def wait_for_others(self, hand: Hand, jobs: set[str], since: float) -> None:
        """Until each of these jobs was begun, or ended, by another worker; of no jobs: until a result comes.

        What a supervisor has started in its place is another one.
        """
        if not jobs:
            return self.wait_for_a_result()

        def taken_up() -> bool:
            others = [other for other in self.site.everyone() if other is not hand or other in self.site.deployed_hands]
            lines = (line for other in others for line in other.lines() if "job" in line)
            return jobs <= {line["job"] for line in lines if seconds_of(line) >= since}

        self.wait(taken_up, f"jobs of the {hand.name} are taken up")

    def choose(self, role: ProcessRole, model: str = WRITER) -> Hand:
        """A worker of this role."""
        return self.random.choice([hand for hand in self.site.hands if (hand.role, hand.model) == (role, model)])


def seen_now(site: Site) -> str:
    """What `kvasir status` says to an operator now."""
    status = site.command("monitor", "status", "--json")
    if status.code:
        return status.stderr.strip().splitlines()[-1]
    state = status.json()
    waiting = sum(state["queues"].values())
    words = [f"{len(state['workers'])} workers, {waiting} waiting"]
    words += [f"nobody serves {model}" for model in state["unserved"]]
    words += [f"no prefill worker serves {model}" for model in state["unprefilled"]]
    return "; ".join(words)


def kill_worker(night: Night, role: ProcessRole, model: str = WRITER) -> str:
    hand = night.choose(role, model)
    hand.process.kill()
    since, jobs = time.time(), hand.held_jobs()
    other = night.site.replace(hand)
    seen = seen_now(night.site)
    night.wait_for_others(hand, jobs, since)
    other.process.wait_until_registered()
    return seen


def kill_deployed_worker(night: Night) -> str:
    """Of one that `kvasir deploy` has started: its supervisor starts it again."""
    hand = night.random.choice(night.site.deployed_hands)
    hand.process.kill()
    since, jobs = time.time(), hand.held_jobs()
    seen = seen_now(night.site)
    night.wait_for_others(hand, jobs, since)
    hand.process.wait_until_registered()
    return seen


def kill_broker(night: Night) -> str:
    broker = night.site.services.broker
    wait_for_disk(broker)
    broker.kill()
    seen = seen_now(night.site)
    broker.start()
    night.wait_for_a_result()
    return seen


def kill_store(night: Night) -> str:
    (store,) = night.site.services.stores
    store.kill()
    seen = seen_now(night.site)
    store.start()
    night.wait_for_a_result()
    return seen


def kill_one_of_three_brokers(night: Night) -> str:
    """The one that clients prefer. It is back when work has gone on without it."""
    cluster, broker = night.site.services.broker_cluster, night.site.services.brokers[0]
    assert cluster
    wait_for_disk(broker)
    broker.kill()
    seen = seen_now(night.site)
    night.wait_for_a_result()
    broker.start()
    cluster.wait_until_whole()
    cluster.wait_for_quorum_plus_one(broker)
    return seen


def kill_a_primary(night: Night) -> str:
    """Its replica takes over, and work goes on; then it is back, as a replica."""
    cluster = night.site.services.store_cluster
    assert cluster
    store = night.random.choice(cluster.primaries())
    store.kill()
    seen = seen_now(night.site)
    wait_until(lambda: store not in cluster.primaries(), "a replica takes over", PATIENCE_S)
    night.wait_for_a_result()
    store.start()
    cluster.wait_until_whole()
    return seen


def clear_what_nobody_holds(night: Night) -> None:
    """What docs/how-to/clusters.md says of jobs that stay in hand while no worker is busy, if there are any."""
    site, start = night.site, time.time()

    def held() -> dict[str, int]:
        return {
            name: count for name, count in site.depths().items() if count and name.startswith(("prefill", "decode"))
        }

    with suppress(AssertionError):  # copies of jobs that are answered may still be under way
        wait_until(lambda: not held(), "no job is in hand", _SETTLED_S, poll_s=1.0)
        return
    jobs = held()
    lines = site.services.broker.control("list_queues", "--no-table-headers", "name", "leader").splitlines()
    leaders = {leader for name, leader in (line.split("\t") for line in lines if "\t" in line) if name in jobs}
    for broker in site.services.brokers:
        if broker.node in leaders:
            broker.control("drain", program="rabbitmq-upgrade")
            broker.control("revive", program="rabbitmq-upgrade")
    wait_until(lambda: not held(), "no job is in hand", PATIENCE_S, poll_s=1.0)
    count = sum(jobs.values())
    night.record.add("leaders of queues are moved", f"{count} messages were in the hand of nobody", start)


def kill_gateway(night: Night) -> str:
    assert night.site.gateway
    unanswered = night.endpoint.unanswered
    night.site.gateway.kill()
    night.wait(lambda: night.endpoint.unanswered > unanswered, "a client finds nobody")
    night.site.serve()
    looks = night.endpoint.looks
    night.wait(lambda: night.endpoint.looks > looks, "a client gets its answer")
    return "clients get no answer, and repeat"


def kill_owner(night: Night) -> str:
    course = night.busiest_course()
    night.site.process_of(course).kill()
    seen = seen_now(night.site)
    _owner_is_back(night, course, lambda: night.site.own(course))
    return f"{course.title}: {seen}"


def kill_desk(night: Night) -> str:
    """Of the page's process: what it started goes on."""
    assert night.desk
    night.desk.kill()
    night.wait_for_a_result()
    return "the page is gone until the desk is started again; the grading goes on"


def close_laptop(night: Night) -> str:
    course = night.busiest_course()
    owner = night.site.process_of(course)
    owner.send(signal.SIGSTOP)
    time.sleep(_ASLEEP_S)
    seen = seen_now(night.site)
    night.fixed = time.time()
    _owner_is_back(night, course, lambda: owner.send(signal.SIGCONT))
    return f"{course.title}: {seen}"


def _owner_is_back(night: Night, course: Course, come: Callable[[], object]) -> None:
    count = len(journal_lines([course.out]))
    come()
    owner = night.site.owners[course.title]
    night.wait(lambda: len(journal_lines([course.out])) > count or not owner.alive, f"{course.title} gets results")


def slow_link(night: Night) -> str:
    for proxy in night.site.services.proxies:
        proxy.delay_s, proxy.bytes_per_s = night.random.uniform(0.03, 0.1), night.random.uniform(2e4, 5e4)
    seen = seen_now(night.site)
    time.sleep(_AWAY_S)
    for proxy in night.site.services.proxies:
        proxy.heal()
    night.fixed = time.time()
    night.wait_for_a_result()
    return seen


def fill_disk(night: Night) -> str:
    """As RabbitMQ sees it: nobody may publish until there is room again."""
    (on, off), broker = _DISK, night.site.services.broker
    broker.control(*on)
    seen = seen_now(night.site)
    time.sleep(_AWAY_S)
    broker.control(*off)
    night.fixed = time.time()
    night.wait_for_a_result()
    return seen


def join(night: Night) -> str:
    hand = night.site.hire("both", WRITER)
    hand.process.wait_until_registered()
    night.wait(
        lambda: hand.held_jobs() or hand.process.events("replied") or not night.open_courses(), "it has begun a job"
    )
    return seen_now(night.site)


def leave(night: Night) -> str:
    hand = night.choose("decode")
    night.site.dismiss(hand)
    assert hand.process.terminate(60) == 0, hand.process.text()[-2000:]
    night.site.miss_nobody()
    assert not hand.held_jobs(), "it left with jobs in its hand"
    return seen_now(night.site)


def upgrade(night: Night) -> str:
    """From the release before, where the history has it: it ends in good order, and its successor comes."""
    hand = next((hand for hand in night.site.hands if hand.is_earlier), None) or night.choose("prefill")
    night.site.dismiss(hand)
    assert hand.process.terminate(60) == 0, hand.process.text()[-2000:]
    other = night.site.hire(hand.role, hand.model, *hand.options)
    seen = seen_now(night.site)
    other.process.wait_until_registered()
    night.wait_for_a_result()
    return seen


@dataclass(frozen=True, slots=True)
class Trouble:
    """An event of the night; `act` returns when work goes on, with what the operator saw meanwhile."""

    event: str
    act: Callable[[Night], str]


TROUBLES = (
    Trouble("SIGKILL of a decode worker", lambda night: kill_worker(night, "decode")),
    Trouble("SIGKILL of the prefill worker", lambda night: kill_worker(night, "prefill")),
    Trouble("SIGKILL of a worker with both roles", lambda night: kill_worker(night, "both")),
    Trouble("SIGKILL of the reader's worker", lambda night: kill_worker(night, "both", READER)),
    Trouble("SIGKILL of the broker", kill_broker),
    Trouble("SIGKILL of the store, which comes back empty", kill_store),
    Trouble("SIGKILL of the gateway", kill_gateway),
    Trouble("SIGKILL of a batch's owner", kill_owner),
    Trouble("a laptop closed for ten seconds", close_laptop),
    Trouble("a slow link to both services", slow_link),
    Trouble("the broker's disk is full", fill_disk),
    Trouble("a machine joins", join),
    Trouble("a worker leaves", leave),
    Trouble("a worker is upgraded", upgrade),
)
_OF_CLUSTERS = {
    kill_broker: Trouble("SIGKILL of one of three brokers", kill_one_of_three_brokers),
    kill_store: Trouble("SIGKILL of a primary of the Redis Cluster", kill_a_primary),
}


def troubles(has_clusters: bool) -> list[Trouble]:
    """Those of a night, by the form of its services."""
    return [_OF_CLUSTERS.get(trouble.act, trouble) if has_clusters else trouble for trouble in TROUBLES]


def strike(night: Night, trouble: Trouble) -> None:
    """One trouble, and its row. Whom the one before it hit is back, and the alert of it has cleared."""
    wait_until(lambda: "KvasirWorkerGone" not in night.alerts.firing(), "nobody is missed", PATIENCE_S, poll_s=0.2)
    start = time.time()
    try:
        seen = trouble.act(night)
    except AssertionError as error:  # the night goes on, and the books will tell
        seen = str(error).splitlines()[0]
        night.record.unequal.append(f"{trouble.event}: {seen}")
    went_on = night.went_on if night.went_on > start else time.time()
    went_on_s = max(0.0, went_on - max(start, night.fixed))
    alerts = night.alerts.since(start)
    night.site.miss_nobody()
    night.record.add(trouble.event, "; ".join([seen, *alerts]), start, went_on_s)

"""Every exchange and queue, once. The same arguments on RabbitMQ 3.10 and 4.x.

Names are made here and nowhere else. `arguments` of a queue never change: RabbitMQ refuses a re-declaration
with others (406), so a change here needs a new queue name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from infra.broker.base import Address, Broker
from messages.jobs import LANES, Lane
from messages.workers import WorkerStage

WORK = "kvasir.work"
REPLY = "kvasir.reply"
REPLY_ALTERNATE = "kvasir.parked"  # alternate exchange of REPLY: takes what has no reply queue
# The two on a cluster, where results outlive the loss of a node: other names, since a queue's arguments can't change.
REPLY_QUORUM = "kvasir.reply.quorum"
REPLY_ALTERNATE_QUORUM = "kvasir.parked.quorum"
DEAD = "kvasir.dead"
CONTROL = "kvasir.control"
STREAM = "kvasir.stream"

# Never dropped for having been delivered often.
_QUORUM_ARGUMENTS: dict[str, str | int] = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000}

DEATHS = "deaths"  # deaths made by the broker, not yet answered with a failed result
DEAD_LETTERS = "dead-letters"  # the graveyard: no TTL, read by people
RESULTS_PARKED = "results.parked"
RESULTS_PARKED_QUORUM = "results.parked.quorum"

_REPLY_QUORUM_PREFIX = "reply.quorum."

RETRY_LEVELS_S = (1, 5, 30, 60, 300, 600)
# Workers decide at 3 + 2 crashes; the broker is the backstop. Explicit, since 4.x defaults to 20 and 3.10 to none.
BROKER_DELIVERY_LIMIT = 20

WORK_STAGES: tuple[WorkerStage, ...] = ("prefill", "decode")

# Queues of lane `bulk` in each stage of a model: so many batches take turns, and more than that share queues. The first
# one is that of releases without turns.
TURNS = 4


def work_queue(stage: WorkerStage, model: str, lane: Lane, turn: int = 0) -> str:
    """`prefill.qwen3-coder:30b.bulk`, and with a turn `….bulk-1`; lane `now` has none."""
    return f"{stage}.{model}.{lane}{f'-{turn}' if turn and lane == 'bulk' else ''}"


def lane_queues(stage: WorkerStage, model: str, lane: Lane) -> list[str]:
    """Every queue of the lane, in the order of turns."""
    return [work_queue(stage, model, lane, turn) for turn in range(TURNS if lane == "bulk" else 1)]


def work_queues(stage: WorkerStage, model: str) -> list[str]:
    """Those of both lanes, `now` first."""
    return [name for lane in LANES for name in lane_queues(stage, model, lane)]


def suspects_queue(stage: WorkerStage, model: str) -> str:
    """Where jobs that too many workers died with wait to run alone."""
    return f"suspects.{stage}.{model}"


@lru_cache(maxsize=256)
def stage_and_model(queue: str) -> tuple[WorkerStage, str]:
    """Those of a work or suspects queue. Raises ValueError for another queue's name."""
    for stage in WORK_STAGES:
        for suffix in work_queues(stage, ""):
            suffix = suffix.removeprefix(f"{stage}.")
            if queue.startswith(f"{stage}.") and queue.endswith(suffix):
                return stage, queue[len(stage) + 1 : -len(suffix)]
        if queue.startswith(suspects_queue(stage, "")):
            return stage, queue.removeprefix(suspects_queue(stage, ""))
    raise ValueError(f"{queue} is not the queue of a model")


def is_suspects_queue(queue: str) -> bool:
    """Whether it is one of `suspects_queue`."""
    return queue.startswith("suspects.")


def jobs_waiting(broker: Broker, stage: WorkerStage, model: str) -> int:
    """Jobs in both lanes, as the broker counts them now. Raises BrokerUnavailable."""
    depths = [broker.depth(name) for name in work_queues(stage, model)]
    return sum(depth.ready for depth in depths if depth)


def reply_queue(batch_id: str, quorum: bool = False) -> str:
    """The batch's own queue of results; on a cluster a quorum queue, under another name."""
    return f"{_REPLY_QUORUM_PREFIX if quorum else 'reply.'}{batch_id}"


def retry_level(seconds: int) -> str:
    """Name of a retry queue: `retry.1s`, `retry.10m`."""
    return f"retry.{seconds}s" if seconds < 60 else f"retry.{seconds // 60}m"


def work(stage: WorkerStage, model: str, lane: Lane, turn: int = 0) -> Address:
    """Where a job of this stage is published."""
    return Address(WORK, work_queue(stage, model, lane, turn))


def suspects(stage: WorkerStage, model: str) -> Address:
    """Where a suspect is published."""
    return Address(WORK, suspects_queue(stage, model))


def ahead_of_bulk(queue: str) -> Address:
    """Where a job goes that has waited its turn in a queue of its model: before the bulk. A suspect stays one."""
    return Address(WORK, queue if is_suspects_queue(queue) else work_queue(*stage_and_model(queue), "now"))


def retry(seconds: int, queue: str) -> Address:
    """A retry level: after its TTL the message goes to `queue`, through WORK."""
    return Address(f"kvasir.{retry_level(seconds)}", queue)


def reply(queue: str) -> Address:
    """A batch's reply queue; unroutable results are parked, so this never fails for lack of a queue."""
    return Address(REPLY_QUORUM if _is_quorum(queue) else REPLY, queue)


def parking_place(queue: str) -> tuple[Address, str]:
    """Where results are parked that found no such reply queue: how to publish there, and the queue."""
    if _is_quorum(queue):
        return Address(REPLY_ALTERNATE_QUORUM, ""), RESULTS_PARKED_QUORUM
    return Address(REPLY_ALTERNATE, ""), RESULTS_PARKED


def _is_quorum(queue: str) -> bool:
    return queue.startswith(_REPLY_QUORUM_PREFIX)


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """An exchange to declare; all are durable."""

    name: str
    kind: Literal["direct", "fanout"]
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """A durable queue to declare, and its binding."""

    name: str
    exchange: str
    key: str
    arguments: dict[str, str | int]

    @property
    def is_classic(self) -> bool:
        """On one node only: away with it."""
        return self.arguments["x-queue-type"] == "classic"


def exchanges(cluster: bool = False) -> Iterator[ExchangeSpec]:
    """In an order in which each can be declared."""
    if cluster:
        yield ExchangeSpec(REPLY_ALTERNATE_QUORUM, "fanout")
        yield ExchangeSpec(REPLY_QUORUM, "direct", {"alternate-exchange": REPLY_ALTERNATE_QUORUM})
    yield ExchangeSpec(WORK, "direct")
    yield ExchangeSpec(REPLY_ALTERNATE, "fanout")
    yield ExchangeSpec(REPLY, "direct", {"alternate-exchange": REPLY_ALTERNATE})
    yield ExchangeSpec(DEAD, "direct")
    yield ExchangeSpec(CONTROL, "fanout")
    yield ExchangeSpec(STREAM, "direct")
    for seconds in RETRY_LEVELS_S:
        # One fanout for each level, so that the routing key stays the work queue's name through the dead-lettering.
        yield ExchangeSpec(f"kvasir.{retry_level(seconds)}", "fanout")


def queues(models: Sequence[str], cluster: bool = False) -> Iterator[QueueSpec]:
    """All durable queues for these models, reply queues excepted."""
    if cluster:
        yield QueueSpec(RESULTS_PARKED_QUORUM, REPLY_ALTERNATE_QUORUM, "", _QUORUM_ARGUMENTS)
    for name in (DEATHS, DEAD_LETTERS):
        yield QueueSpec(name, DEAD, name, _QUORUM_ARGUMENTS)
    yield QueueSpec(RESULTS_PARKED, REPLY_ALTERNATE, "", {"x-queue-type": "classic"})
    for seconds in RETRY_LEVELS_S:
        level = retry_level(seconds)
        yield QueueSpec(level, f"kvasir.{level}", "", _quorum(dead_letter_to=WORK) | {"x-message-ttl": seconds * 1000})
    for model in models:
        for stage in WORK_STAGES:
            for name in (*work_queues(stage, model), suspects_queue(stage, model)):
                arguments = _quorum(dead_letter_to=DEAD) | {"x-dead-letter-routing-key": DEATHS}
                yield QueueSpec(name, WORK, name, arguments | {"x-delivery-limit": BROKER_DELIVERY_LIMIT})


def reply_spec(queue: str) -> QueueSpec:
    """A batch's reply queue.

    Classic on a single node: each quorum queue's name is an Erlang atom until the node restarts, of five million. On a
    cluster a classic queue can't be read while its node is away. No x-expires: it deletes confirmed results.
    """
    return QueueSpec(
        queue, reply(queue).exchange, queue, _QUORUM_ARGUMENTS if _is_quorum(queue) else {"x-queue-type": "classic"}
    )


def _quorum(dead_letter_to: str) -> dict[str, str | int]:
    """Dead-lettered at least once, which asks for reject-publish. No x-max-length: a full queue must never be ours."""
    return {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": dead_letter_to,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }

"""Every exchange and queue, defined once, with arguments that are the same on RabbitMQ 3.10 and 4.x.

All names are made here. The `arguments` of a queue never change: RabbitMQ refuses to declare an existing queue with
other arguments (406), so a change needs a new queue name.
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
# The alternate exchange of REPLY. It gets the results whose reply queue doesn't exist.
REPLY_ALTERNATE = "kvasir.parked"
# On a cluster, these exchanges replace REPLY and REPLY_ALTERNATE, so that results survive the loss of a node. They have
# other names, because the arguments of existing exchanges and queues can't be changed.
REPLY_QUORUM = "kvasir.reply.quorum"
REPLY_ALTERNATE_QUORUM = "kvasir.parked.quorum"
DEAD = "kvasir.dead"
CONTROL = "kvasir.control"
STREAM = "kvasir.stream"

# The delivery limit is so high that the broker never drops a message, however often it comes back.
_QUORUM_ARGUMENTS: dict[str, str | int] = {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000}

DEATHS = "deaths"  # messages that the broker gave up on; their jobs have not been reported as failed yet
DEAD_LETTERS = "dead-letters"  # jobs that can't succeed, kept until a person handles them
RESULTS_PARKED = "results.parked"
RESULTS_PARKED_QUORUM = "results.parked.quorum"

_REPLY_QUORUM_PREFIX = "reply.quorum."

RETRY_LEVELS_S = (1, 5, 30, 60, 300, 600)
# Workers give up on a job after five crashes: three in normal operation, and then two while the job runs alone. The
# broker's limit is the last resort. It is set explicitly, because RabbitMQ 4.x has a default of 20 and RabbitMQ 3.10
# has no limit.
BROKER_DELIVERY_LIMIT = 20

WORK_STAGES: tuple[WorkerStage, ...] = ("prefill", "decode")

# The number of `bulk` queues for each stage of a model. That many batches take turns; further batches share queues.
# An older release of Kvasir uses only the first queue.
TURNS = 4


def work_queue(stage: WorkerStage, model: str, lane: Lane, turn: int = 0) -> str:
    """Return `prefill.qwen3-coder:30b.bulk`, or `….bulk-1` with a turn. The lane `now` has no turns."""
    return f"{stage}.{model}.{lane}{f'-{turn}' if turn and lane == 'bulk' else ''}"


def lane_queues(stage: WorkerStage, model: str, lane: Lane) -> list[str]:
    """Return every queue of the lane, in the order of turns."""
    return [work_queue(stage, model, lane, turn) for turn in range(TURNS if lane == "bulk" else 1)]


def work_queues(stage: WorkerStage, model: str) -> list[str]:
    """Return the queues of both lanes, `now` first."""
    return [name for lane in LANES for name in lane_queues(stage, model, lane)]


def suspects_queue(stage: WorkerStage, model: str) -> str:
    """Return the queue of suspects: jobs that killed too many workers, and that now run alone."""
    return f"suspects.{stage}.{model}"


@lru_cache(maxsize=256)
def stage_and_model(queue: str) -> tuple[WorkerStage, str]:
    """Return the stage and the model of a work or suspects queue. Raises ValueError for another queue's name."""
    for stage in WORK_STAGES:
        for suffix in work_queues(stage, ""):
            suffix = suffix.removeprefix(f"{stage}.")
            if queue.startswith(f"{stage}.") and queue.endswith(suffix):
                return stage, queue[len(stage) + 1 : -len(suffix)]
        if queue.startswith(suspects_queue(stage, "")):
            return stage, queue.removeprefix(suspects_queue(stage, ""))
    raise ValueError(f"{queue} is not the queue of a model")


def is_suspects_queue(queue: str) -> bool:
    """Whether it is a queue for suspects."""
    return queue.startswith("suspects.")


def jobs_waiting(broker: Broker, stage: WorkerStage, model: str) -> int:
    """Return the number of jobs in both lanes, as the broker counts them now. Raises BrokerUnavailable."""
    return broker.ready(*work_queues(stage, model))


def reply_queue(batch_id: str, quorum: bool = False) -> str:
    """Return the queue for a batch's results. On a cluster it is a quorum queue with another name."""
    return f"{_REPLY_QUORUM_PREFIX if quorum else 'reply.'}{batch_id}"


def retry_level(seconds: int) -> str:
    """Return the name of a retry queue: `retry.1s`, `retry.10m`."""
    return f"retry.{seconds}s" if seconds < 60 else f"retry.{seconds // 60}m"


def work(stage: WorkerStage, model: str, lane: Lane, turn: int = 0) -> Address:
    """Return the address where a job of this stage is published."""
    return Address(WORK, work_queue(stage, model, lane, turn))


def suspects(stage: WorkerStage, model: str) -> Address:
    """Return the address where a suspect is published."""
    return Address(WORK, suspects_queue(stage, model))


def ahead_of_bulk(queue: str) -> Address:
    """Return the address ahead of the bulk, for a job that has waited its turn.

    A suspect stays in its suspects queue.
    """
    return Address(WORK, queue if is_suspects_queue(queue) else work_queue(*stage_and_model(queue), "now"))


def retry(seconds: int, queue: str) -> Address:
    """Return the address of a retry level. After its TTL the message goes to `queue`, through the exchange WORK."""
    return Address(f"kvasir.{retry_level(seconds)}", queue)


def reply(queue: str) -> Address:
    """Return the address of a batch's reply queue.

    If the queue doesn't exist, results are parked, so publishing succeeds.
    """
    return Address(REPLY_QUORUM if _is_quorum(queue) else REPLY, queue)


def parking_place(queue: str) -> tuple[Address, str]:
    """Return where results for a missing reply queue are parked: the address to publish to, and the queue."""
    if _is_quorum(queue):
        return Address(REPLY_ALTERNATE_QUORUM, ""), RESULTS_PARKED_QUORUM
    return Address(REPLY_ALTERNATE, ""), RESULTS_PARKED


def _is_quorum(queue: str) -> bool:
    return queue.startswith(_REPLY_QUORUM_PREFIX)


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """An exchange to declare. All exchanges are durable."""

    name: str
    kind: Literal["direct", "fanout"]
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """A durable queue to declare, with its binding."""

    name: str
    exchange: str
    key: str
    arguments: dict[str, str | int]

    @property
    def is_classic(self) -> bool:
        """Whether it is a classic queue, which lives on one node only and can't be used while that node is away."""
        return self.arguments["x-queue-type"] == "classic"


def exchanges(cluster: bool = False) -> Iterator[ExchangeSpec]:
    """Yield all exchanges, in an order in which they can be declared."""
    if cluster:
        yield ExchangeSpec(REPLY_ALTERNATE_QUORUM, "fanout")
        yield ExchangeSpec(REPLY_QUORUM, "direct", {"alternate-exchange": REPLY_ALTERNATE_QUORUM})
    yield ExchangeSpec(WORK, "direct")
    yield ExchangeSpec(REPLY_ALTERNATE, "fanout")
    yield ExchangeSpec(REPLY, "direct", {"alternate-exchange": REPLY_ALTERNATE})
    yield ExchangeSpec(DEAD, "direct")
    yield ExchangeSpec(CONTROL, "fanout")
    yield ExchangeSpec(STREAM, "direct")
    # Each retry level has a fanout exchange, which ignores the routing key. So the key can be the work queue's name,
    # and a dead-lettered message goes to that queue.
    yield from (ExchangeSpec(f"kvasir.{retry_level(seconds)}", "fanout") for seconds in RETRY_LEVELS_S)


def queues(models: Sequence[str], cluster: bool = False) -> Iterator[QueueSpec]:
    """Yield all durable queues for these models, except reply queues."""
    if cluster:
        yield QueueSpec(RESULTS_PARKED_QUORUM, REPLY_ALTERNATE_QUORUM, "", _QUORUM_ARGUMENTS)
    yield from (QueueSpec(name, DEAD, name, _QUORUM_ARGUMENTS) for name in (DEATHS, DEAD_LETTERS))
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
    """Return a batch's reply queue, to declare it.

    On a single node it is classic, because each name of a quorum queue takes one of five million Erlang atoms until the
    node restarts. On a cluster it is a quorum queue, because a classic queue can't be read while its node is away. It
    has no x-expires, which would delete confirmed results.
    """
    return QueueSpec(
        queue, reply(queue).exchange, queue, _QUORUM_ARGUMENTS if _is_quorum(queue) else {"x-queue-type": "classic"}
    )


def _quorum(dead_letter_to: str) -> dict[str, str | int]:
    """Return arguments of a quorum queue that dead-letters at least once, which requires reject-publish.

    There is no x-max-length: a queue of ours must never be full.
    """
    return {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": dead_letter_to,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }

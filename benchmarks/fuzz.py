"""100,000 messages that no producer of ours would send, into the work queues of workers that grade a batch meanwhile.

Each is a valid prefill or decode message, spoilt in one of the ways of `SPOILERS`: bytes flipped, cut, inserted or
doubled; random bytes; another kind, or version, of message; a field of another type, or too long; headers that lie, are
of strange types, nested, or no AMQP that pika can read; identity that is no identity; a reply queue that is not there.

    messages        published
    dead_letters    of those: buried with the reason; the rest was readable after all, and done, or waits
    waiting         in retry levels: newer versions, for the upgrade
    batch_succeeded, batch_total   the batch that ran meanwhile
    restarts        workers that ended, or whose process id changed

What the figures do not show: what a broker does with frames that are no AMQP; nobody but an owner of its credentials
gets that far.
"""

import argparse
import dataclasses
import random
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgpack
import pika

from benchmarks import harness
from benchmarks.batch import Quiet, Tasks
from infra.broker import topology
from infra.broker.base import Message
from infra.broker.envelope import submit_message
from infra.broker.rabbitmq import RabbitMQBroker
from infra.broker.rabbitmq.fast import FastWire
from infra.broker.rabbitmq.properties import CONTENT_TYPE, PERSISTENT
from kvstore.cluster_state import BestEffortClusterState
from kvstore.redis.cluster_state import RedisClusterState
from messages import codec
from messages.jobs import DecodeJob, PrefillJob, Sampling, user_prompt
from messages.workers import WorkerStage
from producers.batch.batch import Batch, Counts
from producers.batch.runner import Runner
from producers.client import Client
from tests.support.processes import SIMULATED_MODEL, Cluster, Worker
from tests.support.waiting import wait_until

MODEL = "bench-batch:1b"
MESSAGES, QUICK_MESSAGES = 100_000, 2_000
JOBS, QUICK_JOBS = 500, 50
OVERSIZED_EVERY = 2_000  # 13 MiB each: enough of them to be met, few enough for a laptop's disk
LISTS = 1_100  # deeper than Python's stack
DRAIN_S = 1800.0
SETTLED_LOOKS = 8  # half a second apart; a settled group takes a hundredth of that


@dataclass
class MessageDraft:
    """A message to spoil: its body, and its AMQP properties."""

    stage: WorkerStage
    body: bytes
    properties: pika.BasicProperties


FIELDS = ("v", "kind", *(field.name for field in dataclasses.fields(PrefillJob)))
Spoiler = Callable[[random.Random, MessageDraft], None]


def flip(rng: random.Random, draft: MessageDraft) -> None:
    """A few bits."""
    spoilt = bytearray(draft.body)
    for _ in range(rng.randint(1, 8)):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    draft.body = bytes(spoilt)


def cut(rng: random.Random, draft: MessageDraft) -> None:
    """The end is missing; all of it, now and then."""
    draft.body = draft.body[: rng.randrange(len(draft.body))]


def insert(rng: random.Random, draft: MessageDraft) -> None:
    """Bytes that do not belong there."""
    at = rng.randrange(len(draft.body) + 1)
    draft.body = draft.body[:at] + rng.randbytes(rng.randint(1, 64)) + draft.body[at:]


def double(rng: random.Random, draft: MessageDraft) -> None:
    """A piece twice."""
    start, end = sorted(rng.randrange(len(draft.body)) for _ in range(2))
    draft.body = draft.body[:end] + draft.body[start:]


def noise(rng: random.Random, draft: MessageDraft) -> None:
    """No message at all."""
    draft.body = rng.randbytes(rng.choice((0, 1, 2, 16, 300, 5000)))


def deep(rng: random.Random, draft: MessageDraft) -> None:
    """Nested as deep as a parser's stack is not."""
    draft.body = b"\x91" * rng.choice((100, 1_100, 100_000)) + b"\xc0"


def lying_length(rng: random.Random, draft: MessageDraft) -> None:
    """A container that promises four billion entries."""
    draft.body = rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6")) + b"\xff\xff\xff\xff" + rng.randbytes(40)


def version(rng: random.Random, draft: MessageDraft) -> None:
    """Another version; a newer one waits for the upgrade."""
    _edit(draft, v=rng.choice((-1, 0, codec.VERSION + 1, 2**40, "1", None, True)))


def kind(rng: random.Random, draft: MessageDraft) -> None:
    """Another kind of message, or none."""
    _edit(draft, kind=rng.choice(("prefill", "decode", "result", "token", "card", "", 7, None, ["prefill"])))


def field(rng: random.Random, draft: MessageDraft) -> None:
    """A field of another type, out of bounds, missing or unknown."""
    fields = msgpack.unpackb(draft.body)
    inner = fields["job"] if draft.stage == "decode" else fields
    name = rng.choice(FIELDS)
    strange = (None, True, -1, 2**63, 1e308, float("nan"), "", "x" * 300, b"\xff", [], [[]], {}, {"a": {}}, "\ud7ff")
    if rng.random() < 0.2:
        inner.pop(name, None)  # one with its default is not sent
    else:
        inner[rng.choice((name, "unheard-of"))] = rng.choice(strange)
    draft.body = msgpack.packb(fields)


def oversized(rng: random.Random, draft: MessageDraft) -> None:
    """More than we take, less than the broker takes."""
    draft.body += rng.randbytes(1024) * (13 * 1024)


def headers(rng: random.Random, draft: MessageDraft) -> None:
    """Counters and identity that lie, or are of strange types."""
    values = (-1, 0, 2**62, "many", "x" * 5000, None, True, [1, [2]], {"a": {"b": 1}}, datetime(9999, 12, 31), b"\xff")
    found = draft.properties.headers
    for name in rng.sample(sorted(found), rng.randint(1, len(found))):
        found[name] = rng.choice(values)
    found[rng.choice(("x-death", "x-delivery-count", "x-first-death-queue", "kvasir-x"))] = rng.choice(values)


def unreadable_headers(rng: random.Random, draft: MessageDraft) -> None:
    """A table that the broker takes and pika can't read: a date in the far future, or lists in lists in lists."""
    far = b"\x04when" + b"T" + struct.pack(">Q", 1 << 41)
    nested = b"".join(b"A" + struct.pack(">I", 5 * (LISTS - level - 1)) for level in range(LISTS))
    draft.properties = _Raw(rng.choice((far, b"\x04list" + nested)))


def identity(rng: random.Random, draft: MessageDraft) -> None:
    """Ids that are none."""
    strange = ("", "x" * 255, "a b", "../../etc", "\N{SNOWMAN}", "job\x00", "*", "%s{}")
    name = rng.choice(("message_id", "correlation_id", "reply_to", "type", "content_type"))
    setattr(draft.properties, name, rng.choice(strange))


def bare(rng: random.Random, draft: MessageDraft) -> None:
    """No properties at all, around nonsense."""
    draft.properties = pika.BasicProperties(delivery_mode=2)
    noise(rng, draft)


SPOILERS: tuple[Spoiler, ...] = (
    *(flip, cut, insert, double, noise, deep, lying_length, version, kind, field),
    *(headers, unreadable_headers, identity, bare),
)


class _Raw(pika.BasicProperties):  # type: ignore[misc]
    """Properties that pika itself would never write: a message id, and a headers table of raw bytes."""

    def __init__(self, table: bytes) -> None:
        super().__init__()
        self._encoded = struct.pack(">HI", _FLAGS, len(table)) + table + b"\x04fuzz"

    def encode(self) -> list[bytes]:
        """See pika."""
        return [self._encoded]


_FLAGS = pika.BasicProperties.FLAG_HEADERS | pika.BasicProperties.FLAG_MESSAGE_ID


def _edit(draft: MessageDraft, **fields: Any) -> None:
    draft.body = msgpack.packb(msgpack.unpackb(draft.body) | fields)


def drafts(seed: int, count: int) -> Iterator[tuple[str, MessageDraft]]:
    """So many spoilt messages, each with its spoiler's name: the same for a seed."""
    rng = random.Random(seed)
    for number in range(count):
        draft = _valid(rng, number)
        spoiler = oversized if number % OVERSIZED_EVERY == OVERSIZED_EVERY - 1 else rng.choice(SPOILERS)
        spoiler(rng, draft)
        yield spoiler.__name__, draft


def _valid(rng: random.Random, number: int) -> MessageDraft:
    ids = (f"fuzz-{number}", "fuzzed", f"item-{number}", MODEL)
    reply_to = rng.choice(("", "reply.fuzzed"))
    prompt = user_prompt("Grade this. ", f"print({number})")
    job = PrefillJob(*ids, prompt, Sampling(8), submitted_at=time.time(), reply_to=reply_to)
    stage = rng.choice(topology.WORK_STAGES)
    message = job if stage == "prefill" else DecodeJob(job.tokenized((1, 2, 3), 0), None, why_no_kv="fuzzed")
    body = codec.encode(message)
    _, sealed = submit_message(job)
    return MessageDraft(stage, body, _properties(replace(sealed, headers={**sealed.headers, "kvasir-stage": stage})))


def _properties(sealed: Message) -> pika.BasicProperties:
    return pika.BasicProperties(
        content_type=CONTENT_TYPE,
        delivery_mode=PERSISTENT,
        message_id=sealed.message_id,
        correlation_id=sealed.correlation_id,
        reply_to=sealed.reply_to or None,
        headers=dict(sealed.headers),
    )


def publish(url: str, seed: int, count: int) -> Counter[str]:
    """Send them all; how many of each sort. On return the broker has them: it has answered to what came after."""
    sent: Counter[str] = Counter()
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for name, draft in drafts(seed, count):
            lane = "now" if sum(sent.values()) % 10 == 0 else "bulk"
            queue = topology.work_queue(draft.stage, MODEL, lane)
            channel.basic_publish(topology.WORK, queue, draft.body, draft.properties, mandatory=True)
            sent[name] += 1
        channel.queue_declare(topology.work_queue("prefill", MODEL, "bulk"), passive=True)
    return sent


def measure(folder: Path, messages: int, jobs: int, seed: int, broker_url: str, store_url: str) -> dict[str, Any]:
    """Fuzz a cluster that grades a batch."""
    with Cluster(folder / "cluster", broker_url, store_url, {MODEL: SIMULATED_MODEL}) as cluster:
        broker = RabbitMQBroker(broker_url, name="fuzz", make_wire=FastWire)
        broker.declare([MODEL])
        before = _depth(broker, topology.DEAD_LETTERS)
        workers = [cluster.worker(role, MODEL) for role in ("prefill", "decode")]
        pids = [worker.pid for worker in workers]
        batch = _BatchBeside(folder / "batch", jobs, broker_url, store_url)
        sent = publish(broker_url, seed, messages)
        counts = batch.counts()
        _wait_settled(broker, workers)
        buried = _depth(broker, topology.DEAD_LETTERS) - before
        figures = {
            "messages": sent.total(),
            "dead_letters": buried,
            "waiting": sum(_depth(broker, topology.retry_level(seconds)) for seconds in topology.RETRY_LEVELS_S),
            "batch_succeeded": counts.succeeded,
            "batch_total": counts.total,
            "restarts": sum(not worker.alive or worker.pid != pid for worker, pid in zip(workers, pids, strict=True)),
            "bugs": sum("bug while" in worker.text() for worker in workers),
            "sorts": dict(sorted(sent.items())),
        }
        broker.close()
        return figures


class _BatchBeside:
    """A batch that runs in a thread while the fuzzer sends."""

    def __init__(self, folder: Path, jobs: int, broker_url: str, store_url: str) -> None:
        self._counts: Counts | None = None
        self._run = (folder, jobs, broker_url, store_url)
        self._thread = threading.Thread(target=self._work, name="batch", daemon=True)
        self._thread.start()

    def counts(self) -> Counts:
        """How it ended, once it has."""
        self._thread.join(DRAIN_S)
        if self._counts is None:
            raise RuntimeError("the batch did not end")
        return self._counts

    def _work(self) -> None:
        folder, jobs, broker_url, store_url = self._run
        broker, cluster_state = (
            RabbitMQBroker(broker_url, name="batch", make_wire=FastWire),
            RedisClusterState(store_url),
        )
        with Client(broker, BestEffortClusterState(cluster_state), [MODEL]) as client, Batch(folder) as batch:
            tasks = Tasks(batch.batch_id, jobs)
            batch.plan(tasks.entries(), {"folder": "made up"})
            self._counts = Runner(batch, tasks, client, Quiet()).run(DRAIN_S)
        broker.close()
        cluster_state.close()


def _wait_settled(broker: RabbitMQBroker, workers: list[Worker]) -> None:
    """Until the work queues are empty and nothing more arrives elsewhere.

    A depth leaves out what workers hold unacked, some hundred messages each: empty queues alone are too early.
    """
    queues = [spec.name for spec in topology.queues([MODEL]) if spec.exchange == topology.WORK]
    arriving = (topology.DEAD_LETTERS, *map(topology.retry_level, topology.RETRY_LEVELS_S))
    looks: deque[tuple[int, ...]] = deque(maxlen=SETTLED_LOOKS)

    def settled() -> bool:
        waiting = [_depth(broker, queue) for queue in (*queues, topology.DEATHS)]
        looks.append((sum(waiting), *(_depth(broker, queue) for queue in arriving)))
        still = len(looks) == SETTLED_LOOKS and len(set(looks)) == 1
        return (still and not any(waiting)) or not all(worker.alive for worker in workers)

    wait_until(settled, "the workers have settled all of it", DRAIN_S, poll_s=0.5)


def _depth(broker: RabbitMQBroker, queue: str) -> int:
    depth = broker.depth(queue)
    return depth.ready if depth else 0


def main() -> int:
    """Print what became of them; 1 if the batch is not whole, or a worker ended."""
    parser = harness.parser(__doc__)
    parser.add_argument("--messages", type=int, default=0, help=f"how many (default: {MESSAGES:,})")
    parser.add_argument("--jobs", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    messages = given.messages or (QUICK_MESSAGES if given.quick else MESSAGES)
    jobs = given.jobs or (QUICK_JOBS if given.quick else JOBS)
    with harness.pair() as pair, tempfile.TemporaryDirectory(prefix="kvasir-fuzz-") as folder:
        figures = measure(Path(folder), messages, jobs, given.seed, pair.broker_url, pair.store_url)
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(harness.machine())
    harness.finish(seed=given.seed, **figures)
    whole = figures["batch_succeeded"] == figures["batch_total"]
    return 0 if whole and not figures["restarts"] and not figures["bugs"] else 1


if __name__ == "__main__":
    sys.exit(main())

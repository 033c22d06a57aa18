"""What goes over the wire beside a message: exchanges, queues, properties, headers, broadcasts; and the store."""

import re
from types import SimpleNamespace
from typing import Any

import msgpack
import redis
from pika import frame  # type: ignore[import-untyped]

from infra.broker import control, topology
from infra.broker.base import Message
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from infra.broker.envelope import open_envelope, submit_message
from infra.broker.rabbitmq.fast import publication
from infra.broker.rabbitmq.properties import to_message
from kvstore.blocks import block_refs
from kvstore.connect import connect
from messages import codec
from messages.errors import ContextExceeded
from tests.support import services
from tests.support.kv_samples import block, hybrid, layout, refs_of, states, tokens, window
from tests.support.pipeline import Pipeline, always_fails
from tests.unit.messages.golden.make import MESSAGES

MODEL = "qwen3-coder:30b"
MARK = "forms"


def broker() -> dict[str, Any]:
    """Names and arguments of exchanges and queues, and what is said beside a body."""
    job = MESSAGES["prefill-every-field"]
    work, submitted = submit_message(job)  # type: ignore[arg-type]
    _, usual = submit_message(MESSAGES["prefill-bare"])  # type: ignore[arg-type]
    counted = dict(submitted.headers) | {"kvasir-attempts": 2, "kvasir-kv-transfers": 1, "kvasir-returns": 3}
    read = Message(b"body", submitted.message_id, submitted.correlation_id, submitted.reply_to, counted)
    sealed = open_envelope(SimpleNamespace(message=read, returns=4), "decode", MODEL).seal(b"body")  # type: ignore[arg-type]
    to, queue = topology.parking_place(topology.reply_queue("BATCH"))
    return {
        "on one node": _declared(cluster=False),
        "on a cluster": _declared(cluster=True),
        "names": {
            "retry": [_address(topology.retry(seconds, "QUEUE")) for seconds in topology.RETRY_LEVELS_S],
            "reply": topology.reply_queue("BATCH"),
            "parked": [_address(to), queue],
        },
        "a submitted job": {"to": _address(work), **_message(submitted)},
        "a submitted job with what is usual": _message(usual),
        "read and sealed again, after returns": _message(sealed),
        "properties in AMQP": _in_amqp(submitted),
        "a dead letter": _dead_letter(),
        "broadcasts": _broadcasts(),
    }


def _declared(cluster: bool) -> dict[str, Any]:
    queues = [*topology.queues([MODEL], cluster), topology.reply_spec(topology.reply_queue("BATCH", quorum=cluster))]
    return {
        "exchanges": [
            f"{each.name}: {each.kind} {each.arguments or ''}".strip() for each in topology.exchanges(cluster)
        ],
        "queues": {each.name: {"exchange": each.exchange, "key": each.key, **each.arguments} for each in queues},
    }


def _address(address: Any) -> str:
    return f"exchange {address.exchange!r}, key {address.key!r}"


def _message(message: Message) -> dict[str, Any]:
    names = ("message_id", "correlation_id", "reply_to", "headers", "persistent")
    return {name: getattr(message, name) for name in names}


def _in_amqp(message: Message) -> dict[str, Any]:
    data, frames = publication(1, topology.work("prefill", MODEL, "now"), message, "TYPE", 131_072), []
    while data:
        used, found = frame.decode_frame(data)
        frames.append(found)
        data = data[used:]
    properties = frames[1].properties
    assert to_message(properties, message.body) == message
    stated = {name: value for name, value in vars(properties).items() if value is not None}
    return stated | {"timestamp": "<seconds>"} if stated.get("timestamp") else stated


def _dead_letter() -> dict[str, Any]:
    """What is said beside a job that was given up, as people read it in the graveyard."""
    with Pipeline() as pipeline:
        pipeline.start_prefill()
        decode = pipeline.start_decode()
        decode.engine.before_decode = always_fails(ContextExceeded("too long"))
        pipeline.run(pipeline.job())
        made = _message(pipeline.dead_letters()[0])
    return made | {"headers": made["headers"] | {"kvasir-failed-at": "<seconds>"}}


def _broadcasts() -> list[Any]:
    """The body of each, as a listener's queue gets it."""
    broker = EmbeddedBroker(EmbeddedServer())
    broker.declare([MODEL])
    queue = broker.open_private_queue("control.forms", topology.CONTROL)
    control.ring(broker, topology.work_queue("prefill", MODEL, "now"))
    control.announce_cancel(broker, "BATCH")
    control.announce_pause(broker, "HOST", True)
    control.announce_pause(broker, "HOST", False)
    found = []
    while delivery := broker.get(queue):
        found.append(msgpack.unpackb(delivery.message.body))
        delivery.ack()
    broker.close()
    return found


# --- the store


def store() -> dict[str, Any]:
    """Every key that is written to a Redis, and the bytes of each kind of value."""
    with services.store() as url:
        client = redis.Redis.from_url(url)
        stores = connect(url)
        try:
            return {"cluster state": _state(stores.cluster_state, client), "KV caches": _kv_caches(stores.kv, client)}
        finally:
            stores.close()
            for key in _keys(client):
                client.delete(key)
            client.zrem("cards", f"{MARK}.1.a")
            client.close()


def _keys(client: Any) -> list[str]:
    return sorted(key.decode() for key in client.scan_iter(f"*{MARK}*", count=10_000))


def _state(state: Any, client: Any) -> dict[str, Any]:
    worker, job = f"{MARK}.1.a", f"{MARK}-job"
    card = codec.decode(codec.encode(MESSAGES["card-every-field"]), type(MESSAGES["card-every-field"]))
    object.__setattr__(card, "worker_id", worker)
    state.register(card, 60)
    state.take_up(worker, [(job, 1), (job, 2)], 60)
    state.finish(worker, [(job, 1, b"result")], 60)
    state.note_answer(job, 2, 3, b"answer", 60)
    state.cancel(f"{MARK}-batch", 60)
    state.count_crashes("decode", job, 1, 2, 60)
    state.put_sketch(f"{MARK}5e7c", b"sketch", 60)
    state.reserve(f"{MARK}-job", 1024, 1 << 40, 60)
    made = {key: _value(client, key) for key in _keys(client)}
    made["cards"] = {"type": client.type("cards").decode(), "has": client.zscore("cards", worker) is not None}
    reserved = client.hget("reservations", f"{MARK}-job").decode()
    made["reservations"] = {
        "type": client.type("reservations").decode(),
        "entry": re.sub(r" \d{13}$", " <ms>", reserved),
    }
    state.unreserve(f"{MARK}-job")
    return made


def _kv_caches(kv: Any, client: Any) -> dict[str, Any]:
    """Blocks that are shared, a job's own and a conversation's; a window; a state. Values with their payload's hash."""
    made = {}
    sliding, mixed = layout("bf16", window=16), hybrid("bf16")
    plain = layout()
    talk = block_refs(f"{MARK}-talk", plain, tokens(40), 40, 0, "job-1", "5e7c", "0a1b2c")
    for name, what, lay, refs in (
        (f"{MARK}-plain", "a class's block, and a job's own", plain, refs_of(plain, 40, 32, f"{MARK}-plain")),
        (f"{MARK}-talk", "a conversation's, of an engine with a sketch", plain, talk),
        (f"{MARK}-window", "with a window", sliding, refs_of(sliding, 40, fingerprint=f"{MARK}-window")),
        (f"{MARK}-state", "with a recurrent state", mixed, refs_of(mixed, 40, fingerprint=f"{MARK}-state")),
    ):
        before = set(_keys(client))
        records = [(ref, block(lay, ref)) for ref in refs]
        if lay is sliding:
            records.append(window(lay, refs[-1]))
        if lay is mixed:
            records += states(lay, refs[-1])
        kv.put(name, lay, records)
        made[what] = {key: _record(client.get(key)) for key in _keys(client) if key not in before}
    return made


def _record(value: bytes) -> dict[str, Any]:
    header, payload = msgpack.unpackb(value)
    return {**header, "pad": len(header["pad"]), "payload bytes": len(payload), "begins": value[:1].hex()}


def _value(client: Any, key: str) -> dict[str, Any]:
    kind = client.type(key).decode()
    found = client.hgetall(key) if kind == "hash" else client.get(key)
    shown = {name.decode(): value.decode() for name, value in found.items()} if kind == "hash" else _shown(found)
    left_s = client.pttl(key) / 1000
    return {"type": kind, "value": shown, "expires": left_s > 50}


def _shown(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return msgpack.unpackb(value)

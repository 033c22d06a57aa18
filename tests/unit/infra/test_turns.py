"""The queues of lane `bulk`: their names, and how a worker takes from them in turn."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from infra.broker.base import Message
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.topology import TURNS, lane_queues, stage_and_model, work, work_queue, work_queues
from infra.turns import Turns

MODEL = "org/tiny-1.5:1b"


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with closing(EmbeddedBroker()) as broker:
        broker.declare([MODEL])
        yield broker


def publish(broker: EmbeddedBroker, turn: int, count: int = 1) -> None:
    for number in range(count):
        broker.publish(work("decode", MODEL, "bulk", turn), Message(b"", f"{turn}.{number}"))


def take_all(turns: Turns) -> list[str]:
    taken = []
    while delivery := turns.pull():
        delivery.ack()
        taken.append(delivery.message.message_id)
    return taken


def test_the_first_queue_is_that_of_the_release_before_and_every_name_tells_its_model() -> None:
    """`work_queue` of infra/broker/topology.py of 992a9c4: f"{stage}.{model}.{lane}"."""
    assert lane_queues("prefill", MODEL, "bulk")[0] == f"prefill.{MODEL}.bulk"
    assert work_queue("decode", MODEL, "now", 3) == f"decode.{MODEL}.now"
    names = work_queues("decode", MODEL)
    assert len(set(names)) == len(names) == 1 + TURNS
    assert {stage_and_model(name) for name in names} == {("decode", MODEL)}


def test_queues_take_turns_and_those_of_empty_ones_are_lent(broker: EmbeddedBroker) -> None:
    publish(broker, 0, 4)
    publish(broker, 1, 2)
    publish(broker, 3, 1)

    assert take_all(Turns(broker, "decode", MODEL)) == ["0.0", "1.0", "3.0", "0.1", "1.1", "0.2", "0.3"]


def test_a_queue_that_was_empty_is_looked_at_again_after_a_while(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("infra.turns.time.monotonic", lambda: now)
    turns = Turns(broker, "decode", MODEL)
    assert turns.pull() is None

    publish(broker, 2)
    publish(broker, 0)
    assert take_all(turns) == ["0.0"]

    now += 0.3
    assert take_all(turns) == ["2.0"]


def test_what_was_pushed_from_the_first_queue_has_its_turn_too(broker: EmbeddedBroker) -> None:
    publish(broker, 0, 2)
    publish(broker, 2, 2)
    turns = Turns(broker, "decode", MODEL)
    with closing(broker.consume(turns.first, 2)) as consumer:
        taken = [delivery.message.message_id for _ in range(4) if (delivery := turns.take(lambda: consumer.receive(0)))]

    assert taken == ["0.0", "2.0", "0.1", "2.1"]

"""A broker that has lost a subscription: its channel is open, jobs wait, and nothing comes."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from infra.broker import topology
from infra.broker.base import Address, Delivery, Message
from infra.broker.consume import ConsumerLoop, Flow
from infra.broker.rabbitmq import RabbitMQBroker
from infra.broker.settle import Settler
from prefill_worker.worker import PrefillFlow, SlotFlow
from tests.support.servers import RabbitMQServer
from tests.support.waiting import wait_until

MODEL = "forgotten:1b"
BULK = topology.work_queue("prefill", MODEL, "bulk")

# What a partition that heals may leave behind, done to the queue itself: the channel hears nothing of it.
_FORGET = f"""
    {{ok, Queue}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{BULK}">>)),
    Leader = amqqueue:get_pid(Queue),
    {{ok, {{_, Consumers}}, _}} = ra:leader_query(Leader, fun rabbit_fifo:query_consumers/1),
    [ra:process_command(Leader, rabbit_fifo:make_checkout(Id, cancel, #{{}})) || Id <- maps:keys(Consumers)],
    maps:size(Consumers)."""


class Taker:
    """A handler that settles what it is given at once."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def wait_for_room(self, _timeout_s: float) -> bool:
        return True

    def holding(self) -> int:
        return 0

    def take(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.taken.append(delivery.message.message_id)
            delivery.ack()

    def finish(self) -> None:
        pass

    def on_cancel(self, _batch_id: str) -> None:
        pass

    def tick(self) -> None:
        pass


@pytest.mark.parametrize("kind", [PrefillFlow, SlotFlow])
def test_a_worker_that_the_broker_has_forgotten_listens_anew(
    kind: type[PrefillFlow | SlotFlow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.broker.consume._DEATHS_EVERY_S", 0.3)
    monkeypatch.setattr("infra.broker.consume._FORGOTTEN_S", 1.0)
    with (
        RabbitMQServer() as server,
        closing(RabbitMQBroker(server.url)) as broker,
        closing(RabbitMQBroker(server.url)) as others,
    ):
        settler = Settler(broker, [MODEL], lambda _event: None)

        def open_flow() -> Flow:
            return kind(broker, MODEL, lambda left: settler.hand_back_all(left, "prefill"))

        loop, taker = ConsumerLoop(broker, settler, "prefill", MODEL, "me", open_flow), Taker()
        thread = threading.Thread(target=loop.run, args=(taker,), daemon=True)
        thread.start()
        try:
            # Given a worker that listens, and has been sent a job
            others.declare([MODEL])
            others.publish(Address(topology.WORK, BULK), Message(b"", "first"))
            wait_until(lambda: taker.taken == ["first"], "it takes jobs", 30)
            wait_until(lambda: (depth := others.depth(BULK)) and depth.consumers == 1, "it listens", 30)
            # When the queue forgets it, and jobs come
            assert server.control("eval", _FORGET).split()[-1] == "1"
            others.publish(Address(topology.WORK, BULK), Message(b"", "second"))
            # Then it takes them all the same, and goes on being sent what comes
            wait_until(lambda: taker.taken == ["first", "second"], "it listens anew", 30)
            others.publish(Address(topology.WORK, BULK), Message(b"", "third"))
            wait_until(lambda: taker.taken == ["first", "second", "third"], "it is sent jobs", 30)
        finally:
            loop.stop()
            thread.join(30)

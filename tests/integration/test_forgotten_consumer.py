"""A broker that has lost a subscription: its channel is open, jobs wait, and nothing comes."""

import threading
from contextlib import closing
from pathlib import Path

import pytest

from infra.broker import topology
from infra.broker.base import Address, Delivery, Message
from infra.broker.rabbitmq import RabbitMQBroker
from infra.broker.settle import Settler
from infra.worker_loop import ConsumerLoop, Flow
from kvstore.redis.cluster_state import RedisClusterState
from messages import codec
from messages.jobs import JobResult, Sampling, user_prompt
from prefill_worker.flow import PrefillFlow, SlotFlow
from producers.batch.batch import Batch, BatchEntry
from producers.batch.runner import Runner
from producers.client import Client
from tests.support.pipeline import RecordingProgress
from tests.support.servers import RabbitMQServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # some twenty seconds

MODEL = "forgotten:1b"
BULK = topology.work_queue("prefill", MODEL, "bulk")


def forget_consumers(server: RabbitMQServer, queue: str) -> int:
    """What a partition that heals may leave behind, done to the queue itself: the channel hears nothing of it."""
    code = f"""
        {{ok, Queue}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)),
        Leader = amqqueue:get_pid(Queue),
        {{ok, {{_, Consumers}}, _}} = ra:leader_query(Leader, fun rabbit_fifo:query_consumers/1),
        Ids = [{{element(2, Consumer), element(1, Consumer)}} || Consumer <- maps:values(Consumers)],
        [ra:process_command(Leader, rabbit_fifo:make_checkout(Id, cancel, #{{}})) || Id <- Ids],
        maps:size(Consumers)."""
    return int(server.control("eval", code).split()[-1])


class Taker:
    """Jobs and a handler: it settles what it is given at once."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def wait(self, _timeout_s: float) -> bool:
        return True

    def count_in_progress(self) -> int:
        return 0

    def accept(self, delivery: Delivery) -> None:
        self.taken.append(delivery.message.message_id)
        delivery.ack()

    def finish(self) -> None:
        pass

    close = finish

    def has_room(self) -> bool:
        return True

    def on_cancel(self, _batch_id: str) -> None:
        pass

    def tick(self) -> None:
        pass


@pytest.mark.parametrize("kind", [PrefillFlow, SlotFlow])
def test_a_worker_that_the_broker_has_forgotten_listens_anew(
    kind: type[PrefillFlow | SlotFlow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.worker_loop._DEATHS_EVERY_S", 0.3)
    monkeypatch.setattr("infra.worker_loop._FORGOTTEN_S", 1.0)
    with (
        RabbitMQServer() as server,
        closing(RabbitMQBroker(server.url)) as broker,
        closing(RabbitMQBroker(server.url)) as others,
    ):
        settler = Settler(broker, [MODEL], lambda _event: None)

        def open_flow() -> Flow:
            if kind is SlotFlow:
                return SlotFlow(broker, MODEL, settler.hand_back_all)
            return PrefillFlow(broker, broker.consume, MODEL)

        loop, taker = ConsumerLoop(broker, settler, "prefill", MODEL, "me", open_flow), Taker()
        thread = threading.Thread(target=loop.run, args=(taker, taker), daemon=True)
        thread.start()
        try:
            # Given a worker that listens, and has been sent a job
            others.declare([MODEL])
            others.publish(Address(topology.WORK, BULK), Message(b"", "first"))
            wait_until(lambda: taker.taken == ["first"], "it takes jobs", 30)
            wait_until(lambda: (depth := others.depth(BULK)) and depth.consumers == 1, "it listens", 30)
            # When the queue forgets it, and jobs come
            assert forget_consumers(server, BULK) == 1
            others.publish(Address(topology.WORK, BULK), Message(b"", "second"))
            # Then it takes them all the same, and goes on being sent what comes
            wait_until(lambda: taker.taken == ["first", "second"], "it listens again", 30)
            others.publish(Address(topology.WORK, BULK), Message(b"", "third"))
            wait_until(lambda: taker.taken == ["first", "second", "third"], "it is sent jobs", 30)
        finally:
            loop.stop()
            thread.join(30)


def test_an_owner_that_the_broker_has_forgotten_gets_its_results(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.batch.runner._LOOK_AROUND_S", 0.3)
    with (
        RabbitMQServer() as server,
        closing(RabbitMQBroker(server.url)) as workers,
        closing(RabbitMQBroker(server.url, nodes=3)) as broker,  # so that replies are in a quorum queue
        closing(RedisClusterState(store_url)) as cluster_state,
        closing(Batch(tmp_path / "out")) as batch,
    ):
        client, parts = Client(broker, cluster_state, [MODEL]), user_prompt("", "Grade this.")
        job = client.new_job(batch.batch_id, "alice", MODEL, parts, Sampling(16))
        batch.plan([BatchEntry(job.job_id, "alice", MODEL, "code", "alice")], {})
        owner = threading.Thread(target=Runner(batch, [job], client, RecordingProgress()).run, args=(60,), daemon=True)
        owner.start()
        # Given an owner that has published its job, and listens
        reply_queue = topology.reply_queue(batch.batch_id, quorum=True)
        wait_until(lambda: (depth := workers.depth(BULK)) and depth.ready == 1, "the job is published", 30)
        wait_until(lambda: (depth := workers.depth(reply_queue)) and depth.consumers == 1, "it listens", 30)
        # When its reply queue forgets it, and the result comes
        assert forget_consumers(server, reply_queue) == 1
        result = JobResult(job.job_id, 1, batch.batch_id, "alice", MODEL, "succeeded", text="good")
        message = Message(codec.encode(result), job.job_id, batch.batch_id)
        workers.publish(topology.reply(reply_queue), message)
        # Then it reads it all the same
        owner.join(30)
        assert not owner.is_alive()
        assert batch.result(job.job_id) == result

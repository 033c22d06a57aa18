"""The Broker contract on RabbitMQ 3.10 to 4.x."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pika.channel  # type: ignore[import-untyped]

from infra.broker import topology
from infra.broker.base import Address, Broker, Consumer, Delivery, Depth, Message
from infra.broker.rabbitmq.channel import Channel, converse
from infra.broker.rabbitmq.connection import Connection, all_parameters
from infra.broker.rabbitmq.consumer import RabbitConsumer
from infra.broker.rabbitmq.errors import PRECONDITION_FAILED
from infra.broker.rabbitmq.getter import Getter
from infra.broker.rabbitmq.publisher import Publisher, Stream
from infra.broker.rabbitmq.wire import Wire
from messages.errors import BrokerUnavailable, ConfigError, KvasirError, NoQueue

log = logging.getLogger(__name__)

_PRIVATE_ARGUMENTS = {"x-queue-type": "classic"}


class RabbitMQBroker(Broker):
    """RabbitMQ over two connections: an alarm blocks the connection that publishes, and must not block acks.

    Both connections reconnect in the background without limit. After that, private queues are declared and consumers
    subscribe again.

    Args:
        url: `amqp://user:password@host:5672/vhost` or `amqps://…`. Several hosts are separated by commas, the
            preferred one first. Options in the query are read by pika.
        name: the name of these connections in the broker's own tools.
        connect_timeout_s: how long the constructor tries to connect.
        ca_file: PEM file of the CA that signed the broker's certificate, for amqps; "": the system's CAs.
        nodes: number of nodes of the cluster. With several, reply queues survive the loss of one.
        command_timeout_s: how long declare, consume, get, depth and delete wait for an answer, reconnects included.
        make_wire: makes the layer between pika and the socket; `FastWire` is the faster one.

    Raises:
        BrokerUnavailable: the broker did not answer in time.
        ConfigError: the URL can't be read, or the broker refused the user, the password or the virtual host.
    """

    def __init__(
        self,
        url: str,
        name: str = "kvasir",
        connect_timeout_s: float = 10.0,
        command_timeout_s: float = 30.0,
        ca_file: str = "",
        nodes: int = 1,
        make_wire: Callable[[], Wire] = Wire,
    ) -> None:
        self.is_clustered = nodes > 1
        self._command_timeout_s = command_timeout_s
        self._closed = False
        self._consumers: list[RabbitConsumer] = []
        self._private: dict[str, str] = {}  # queue -> exchange
        publishing, consuming = (all_parameters(url, f"{name} ({use})", ca_file) for use in ("publish", "consume"))
        self._publisher = Publisher(publishing, make_wire)
        self._publishing = self._publisher.connection
        self._consuming = Connection(consuming, self._on_consuming_open, lambda: None, make_wire)
        # A connection that receives streamed tokens stays at its address, because a move to a better address would lose
        # tokens. A connection that only receives commands can move, because a lost command can be repeated.
        self._consuming.is_pinned = lambda: topology.STREAM in list(self._private.values())
        self._getter = Getter(self._consuming)
        deadline = time.monotonic() + connect_timeout_s
        try:
            self._publishing.start()
            self._consuming.start()
            for connection in (self._publishing, self._consuming):
                connection.wait_open(deadline - time.monotonic())
            if not self._publisher.ready.wait(deadline - time.monotonic()):
                raise BrokerUnavailable(f"the broker at {self._publishing.peer} did not open a channel in time")
        except KvasirError:
            self.close()
            raise

    def declare(self, models: Sequence[str]) -> list[str]:
        """See `Broker`."""
        remarks = [self._declare_exchange(spec) for spec in topology.exchanges(self.is_clustered)]
        remarks += [self._declare_if_reachable(spec) for spec in topology.queues(models, self.is_clustered)]
        return [remark for remark in remarks if remark]

    def publish(self, to: Address, message: Message, timeout_s: float | None = 30.0) -> None:
        """See `Broker`."""
        self.publish_many([(to, message)], window=1, timeout_s=timeout_s)

    def publish_many(
        self,
        sends: Iterable[tuple[Address, Message]],
        on_confirmed: Callable[[Message], None] = lambda _message: None,
        window: int = 1000,
        timeout_s: float | None = 30.0,
    ) -> int:
        """See `Broker`."""
        return Stream(self._publisher, window, timeout_s).publish_all(sends, on_confirmed)

    def publish_lossy(self, to: Address, message: Message) -> None:
        """See `Broker`."""
        self._publisher.send_lossy(to, message)

    def consume(self, queue: str, prefetch: int, exclusive: bool = False) -> Consumer:
        """See `Broker`."""
        consumer = RabbitConsumer(self._consuming, queue, prefetch, exclusive, self._consumers.remove)
        self._consumers.append(consumer)
        consumer.start(self._command_timeout_s)
        return consumer

    def get(self, queue: str) -> Delivery | None:
        """See `Broker`."""
        return self._getter.get(queue, self._command_timeout_s)

    def depths(self, *queues: str) -> dict[str, Depth | None]:
        """See `Broker`. All queues are asked for on one channel, because opening one costs the broker more than that.

        A missing queue closes the channel, so the queues after it need another.
        """
        found: dict[str, Depth | None] = {}

        def talk(channel: Channel) -> None:
            for queue in missing:
                reply = channel.call("queue_declare", queue=queue, passive=True)
                found[queue] = Depth(ready=reply.message_count, consumers=reply.consumer_count)

        while missing := [queue for queue in queues if queue not in found]:
            try:
                self._converse(f"reading the depth of {', '.join(missing):.100}", talk)
            except NoQueue:
                found[next(queue for queue in missing if queue not in found)] = None
        return found

    def open_reply_queue(self, batch_id: str) -> str:
        """See `Broker`."""
        queue = topology.reply_queue(batch_id, self.is_clustered)
        remark = self._declare_queue(topology.reply_spec(queue))
        if remark:
            log.warning(remark)
        return queue

    def open_private_queue(self, name: str, exchange: str) -> str:
        """See `Broker`."""

        def talk(channel: Channel) -> None:
            channel.call("queue_declare", queue=name, exclusive=True, arguments=_PRIVATE_ARGUMENTS)
            channel.call("queue_bind", queue=name, exchange=exchange, routing_key=name)

        # Declare the queue on the consuming connection, because only the connection that declares an exclusive queue
        # can use it.
        converse(self._consuming, f"opening private queue {name}", self._command_timeout_s, talk)
        self._private[name] = exchange
        return name

    def delete_queue(self, queue: str) -> None:
        """See `Broker`."""
        if queue not in self._private and not queue.startswith(topology.reply_queue("")):
            raise ValueError(f"{queue} can't be deleted: it is not a reply queue or this process's private queue")
        self._private.pop(queue, None)
        # RabbitMQ confirms the deletion even if the queue doesn't exist.
        self._converse(f"deleting queue {queue}", lambda channel: channel.call("queue_delete", queue=queue))

    @property
    def is_connected(self) -> bool:
        """See `Broker`."""
        return self._publishing.is_open and self._consuming.is_open

    @property
    def server(self) -> dict[str, Any]:
        """The broker's server properties, such as product, version and capabilities; {} before the first connection."""
        return self._publishing.server

    @property
    def alarm(self) -> str:
        """Why the broker blocks publishers ("low on memory"), or "".

        It tells only connections that tried to publish since then.
        """
        return self._publishing.alarm

    def close(self) -> None:
        """See `Broker`."""
        if self._closed:
            return
        self._closed = True
        self._publisher.close()
        self._consuming.close()  # before the publishing connection, which closes slowly during an alarm
        self._publishing.close()
        for consumer in list(self._consumers):
            consumer.nudge()  # wake `receive`, which then finds the connection closed

    def _converse(self, action: str, talk: Callable[[Channel], Any]) -> Any:
        return converse(self._consuming, action, self._command_timeout_s, talk)

    def _declare_exchange(self, spec: topology.ExchangeSpec) -> str | None:
        def talk(channel: Channel) -> None:
            channel.call(
                "exchange_declare",
                exchange=spec.name,
                exchange_type=spec.kind,
                durable=True,
                arguments=dict(spec.arguments),
            )

        try:
            return self._unless_different(f"exchange {spec.name}", talk)
        # This user is not allowed to create the exchange. If the exchange does not exist, publishing will fail.
        except ConfigError:
            return None

    def _declare_if_reachable(self, spec: topology.QueueSpec) -> str | None:
        try:
            return self._declare_queue(spec)
        except NoQueue as error:
            if not (self.is_clustered and spec.is_classic):
                raise
            return f"queue {spec.name} can't be used while its node is away: {error}"

    def _declare_queue(self, spec: topology.QueueSpec) -> str | None:
        def declare(channel: Channel) -> None:
            channel.call("queue_declare", queue=spec.name, durable=True, arguments=dict(spec.arguments))

        def bind(channel: Channel) -> None:
            channel.call("queue_declare", queue=spec.name, passive=True)
            channel.call("queue_bind", queue=spec.name, exchange=spec.exchange, routing_key=spec.key)

        try:
            remark = self._unless_different(f"queue {spec.name}", declare)
        except ConfigError:
            self._must_exist(spec.name)
            return None
        self._converse(f"binding queue {spec.name}", bind)
        return remark

    def _must_exist(self, queue: str) -> None:
        """Raise ConfigError if a queue that this user may not create doesn't exist."""
        try:
            self._converse(
                f"looking for {queue}", lambda channel: channel.call("queue_declare", queue=queue, passive=True)
            )
        # RabbitMQ 4.3 can refuse even this check. In that case, the first use of the queue will show whether it exists.
        except ConfigError:
            return
        except NoQueue as error:
            # RabbitMQ also answers 404 for a classic queue whose node is down, but with another text
            # (rabbit_amqqueue.erl, priv_absent).
            if f"no queue '{queue}'" not in str(error):
                raise
            raise ConfigError(
                f"queue {queue} does not exist, and this user of the broker is not allowed to create it: "
                "run kvasir status once as the operator, to create all queues"
            ) from None

    def _unless_different(self, subject: str, talk: Callable[[Channel], None]) -> str | None:
        """Declare something. If it exists with other properties than ours, return a sentence that says so."""
        try:
            self._converse(f"declaring {subject}", talk)
        except BrokerUnavailable as error:
            if f"{PRECONDITION_FAILED} PRECONDITION_FAILED" not in str(error):
                raise
            return f"{subject} already exists with different properties and is used as it is: {error}"
        return None

    def _on_consuming_open(self) -> None:
        for name in list(self._private):
            self._open_private_again(name)
        for consumer in list(self._consumers):
            consumer.on_connected()

    def _open_private_again(self, name: str) -> None:
        """(IO) Declare a private queue again, since it was deleted with its connection.

        The broker refuses this (405) until it has noticed that the old connection is gone, so a refused attempt is
        repeated.
        """
        if name in self._private and self._consuming.is_open:
            self._consuming.raw.channel(on_open_callback=partial(self._redeclare, name))

    def _redeclare(self, name: str, channel: pika.channel.Channel) -> None:
        def on_refusal(_channel: pika.channel.Channel, _reason: BaseException) -> None:
            if channel not in bound_channels:
                self._consuming.later(1.0, partial(self._open_private_again, name))

        def on_bind(_answer: object) -> None:
            bound_channels.append(channel)
            channel.close()

        bound_channels: list[pika.channel.Channel] = []
        channel.add_on_close_callback(on_refusal)
        channel.queue_declare(name, exclusive=True, arguments=_PRIVATE_ARGUMENTS)
        channel.queue_bind(name, self._private.get(name, topology.STREAM), name, callback=on_bind)

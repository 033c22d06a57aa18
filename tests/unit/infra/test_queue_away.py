"""What a user who may create no queues is told of a queue that RabbitMQ answers 404 for."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.broker.rabbitmq.broker import RabbitMQBroker
from infra.broker.rabbitmq.errors import ACCESS_REFUSED, NOT_FOUND, of_reply
from messages.errors import ConfigError, NoQueue


class BrokerOfReplies(RabbitMQBroker):
    """Refuses to declare queues, and answers a question about one with a given text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _converse(self, action: str, talk: Callable[..., Any]) -> Any:
        if action.startswith("declaring"):
            raise of_reply(ACCESS_REFUSED, "ACCESS_REFUSED - configure access to queue refused", action)
        raise of_reply(NOT_FOUND, self.text, action)


# The replies are those of RabbitMQ's rabbit_amqqueue.erl: not_found/1 and priv_absent/4.
def test_a_queue_that_does_not_exist_has_to_be_declared_by_the_operator() -> None:
    broker = BrokerOfReplies("NOT_FOUND - no queue 'results.parked' in vhost '/'")

    with pytest.raises(ConfigError, match=r"queue results\.parked does not exist"):
        broker._must_exist("results.parked")


@pytest.mark.parametrize(
    "text",
    [
        "NOT_FOUND - home node 'rabbit@b' of durable queue 'results.parked' in vhost '/' is down or inaccessible",
        "NOT_FOUND - queue 'results.parked' in vhost '/' process is stopped by supervisor",
    ],
)
def test_a_queue_whose_node_is_away_is_not_called_missing(text: str) -> None:
    with pytest.raises(NoQueue, match=r"results\.parked"):
        BrokerOfReplies(text)._must_exist("results.parked")

"""What a user of RabbitMQ may not do."""

from collections.abc import Callable

import pika
from pika.adapters.blocking_connection import BlockingChannel


def is_refused(url: str, action: Callable[[BlockingChannel], object]) -> bool:
    """Whether RabbitMQ answers 403 to what the user in `url` tries."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        try:
            action(channel)
        except pika.exceptions.ChannelClosedByBroker as closed:
            return bool(closed.reply_code == 403)
        return False

"""The broker on RabbitMQ. Only this package imports pika."""

from infra.broker.rabbitmq.broker import RabbitMQBroker

__all__ = ["RabbitMQBroker"]

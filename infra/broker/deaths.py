"""Answers the messages that the broker gave up after too many returns, so that each of their jobs gets a result."""

from typing import Any

from infra.broker import topology
from infra.broker.base import Broker
from infra.broker.envelope import Attempt, open_envelope
from infra.broker.settle import Settler
from messages import checks
from messages.errors import InvalidMessage, Poison
from messages.workers import WorkerStage


def answer_deaths(broker: Broker, settler: Settler, model: str) -> None:
    """Settle up to 100 messages of the queue `deaths`: publish a failed result and a dead letter for each, then ack it.

    `model` is the model of a message that doesn't name its own. Raises BrokerUnavailable.
    """
    for _ in range(100):
        delivery = broker.get(topology.DEATHS)
        if delivery is None:
            return
        headers = delivery.message.headers
        stage: WorkerStage = "decode" if headers.get("kvasir-stage") == "decode" else "prefill"
        envelope = open_envelope(delivery, stage, _model(headers.get("kvasir-model"), model))
        reason = f"the broker gave the job up, because it came back more than {topology.BROKER_DELIVERY_LIMIT} times"
        settler.fail(Attempt[Any]([delivery], envelope), Poison(reason))


def _model(header: object, default: str) -> str:
    try:
        checks.model_name("kvasir-model", header)
    except InvalidMessage:
        return default
    return str(header)

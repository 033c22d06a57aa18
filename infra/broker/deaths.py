"""Messages that the broker gave up at a queue's delivery limit. Every worker answers them with a failed result, so that
no job ends silently."""

from typing import Any

from infra.broker import topology
from infra.broker.base import Broker
from infra.broker.envelope import Attempt, open_envelope
from infra.broker.settle import Settler
from messages import checks
from messages.errors import InvalidMessage, Poison
from messages.workers import WorkerStage


def answer_deaths(broker: Broker, settler: Settler, model: str) -> None:
    """For at most 100 messages in `deaths`: publish a failed result, then the dead letter, then ack.

    `model` is used for a message that doesn't name its model. Raises BrokerUnavailable.
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

"""The peer of `overhead`: the same two stages as Dramatiq actors, with publisher confirms and results in Redis.

Loaded by `dramatiq benchmarks.overhead_peer` in each of its worker processes, and by the benchmark that submits.
"""

import os
import time

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from tests.support.services import BROKER_VARIABLE, STORE_VARIABLE

QUEUES_VARIABLE = "KVASIR_BENCH_PEER"  # a prefix of this run's own, for queues and results

_own = os.environ.get(QUEUES_VARIABLE, "kvasir-bench")
results = RedisBackend(url=os.environ[STORE_VARIABLE], namespace=_own)
broker = RabbitmqBroker(url=os.environ[BROKER_VARIABLE], confirm_delivery=True)
broker.add_middleware(Results(backend=results))
dramatiq.set_broker(broker)

PREFILL, DECODE = f"{_own}.prefill", f"{_own}.decode"


@dramatiq.actor(queue_name=PREFILL, max_retries=3)
def prefill(prompt: str) -> str:
    """The first stage: hands the prompt on."""
    return prompt


@dramatiq.actor(queue_name=DECODE, max_retries=3, store_results=True)
def decode(prompt: str) -> dict[str, float | str]:
    """The second: an answer, and when it was made."""
    return {"text": prompt[:4], "at": time.time()}


def pipeline(prompt: str) -> dramatiq.pipeline:
    """One job through both stages."""
    return prefill.message(prompt) | decode.message()

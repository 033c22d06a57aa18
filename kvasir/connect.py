"""Makes a Client from settings: for the cluster if a broker is configured, else for a pipeline in this process."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import kvstore.connect
from infra.config.settings import Settings
from kvasir.pipeline import local_client
from kvstore.cluster_state import BestEffortClusterState
from kvstore.connect import Stores
from messages.errors import BatchError, ConfigError
from monitoring.events import Observer
from producers.client import Client

if TYPE_CHECKING:
    from infra.broker.rabbitmq import RabbitMQBroker


def connect(
    settings: Settings, models: Sequence[str] = (), observe: Observer = lambda _event: None, name: str = "client"
) -> Client:
    """Return a client for `models` (default: all configured models). Close it, or use it as a context manager.

    Raises:
        ConfigError: a model is not configured, or the settings contradict each other.
        BrokerUnavailable, StoreUnavailable: the cluster can't be reached.
    """
    names = [settings.model(model).name for model in models] or list(settings.models)
    if not is_cluster(settings):
        return local_client(settings, names, observe)
    with ExitStack() as stack:
        broker = stack.enter_context(closing(open_broker(settings, name)))
        stores = stack.enter_context(closing(open_stores(settings)))
        cluster_state = BestEffortClusterState(stores.cluster_state)
        return Client(broker, cluster_state, list(settings.models), observe, on_close=stack.pop_all().close)


def is_cluster(settings: Settings) -> bool:
    """Whether a broker and a store are configured. Raises ConfigError if only one of them is."""
    broker, store = bool(settings.services.broker), bool(settings.services.store)
    if broker != store:
        missing_setting = "KVASIR_STORE_URL=redis://…" if broker else "KVASIR_BROKER_URL=amqp://…"
        raise ConfigError(
            f"a cluster needs both a broker and a store: set {missing_setting} too, or unset the other to stay local"
        )
    return broker


def require_cluster(settings: Settings, command: str, alternative: str = "") -> None:
    """Raise BatchError if no cluster is configured. `alternative` is added to the message."""
    if not is_cluster(settings):
        raise BatchError(
            f"no broker is configured, and kvasir {command} needs one that outlives this process: set "
            "KVASIR_BROKER_URL and KVASIR_STORE_URL" + alternative
        )


def open_broker(settings: Settings, name: str) -> "RabbitMQBroker":
    """Connect to the configured broker. Raises BrokerUnavailable."""
    # Imported here, so that the local pipeline does not need pika.
    from infra.broker.rabbitmq import RabbitMQBroker
    from infra.broker.rabbitmq.fast import FastWire

    url, ca_file = settings.broker_url_with_secret(), settings.broker_ca_file()
    nodes = settings.services.broker_nodes
    return RabbitMQBroker(url, name=f"kvasir {name}", ca_file=ca_file, nodes=nodes, make_wire=FastWire)


def open_stores(settings: Settings) -> Stores:
    """Connect to the configured store. Raises StoreUnavailable."""
    return kvstore.connect.connect(settings.store_url_with_secret())

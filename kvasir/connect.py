"""From settings to a Client, of the cluster or of a pipeline in this process, and to the options of an engine."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import kvstore.connect
from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from engines.entry import EngineOptions
from engines.proof import prove
from engines.registry import Engine, open_engine
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from infra.config.settings import ModelSettings, Settings
from kvstore.cluster_state import BestEffortClusterState
from kvstore.connect import Stores
from kvstore.heartbeat import REGISTRATION_TTL_S
from messages.errors import BatchError, ConfigError
from messages.installed import engine_entry
from messages.lifecycle import Event
from monitoring.events import Observer
from prefill_worker.worker import PrefillWorker
from producers.client import Client

if TYPE_CHECKING:
    from infra.broker.rabbitmq import RabbitMQBroker

log = logging.getLogger(__name__)


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
        return _local_client(settings, names, observe)
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
            f"a cluster needs both a broker and a store: set {missing_setting} too, or unset the other setting"
        )
    return broker


def require_cluster(settings: Settings, command: str, alternative: str = "") -> None:
    """Raise BatchError if no cluster is configured. `alternative` is added to the message."""
    if not is_cluster(settings):
        raise BatchError(
            f"no broker is configured, and kvasir {command} needs a broker that outlives this process: set "
            "KVASIR_BROKER_URL and KVASIR_STORE_URL" + alternative
        )


def open_broker(settings: Settings, name: str) -> "RabbitMQBroker":
    """Connect to the configured broker. Raises BrokerUnavailable."""
    # Imported here, so that the local pipeline does not need pika.
    from infra.broker.rabbitmq import RabbitMQBroker
    from infra.broker.rabbitmq.fast import FastWire

    url, ca_file = settings.broker_url_with_secret(), settings.broker_ca_file()
    return RabbitMQBroker(
        url, name=f"kvasir {name}", ca_file=ca_file, nodes=settings.services.broker_nodes, make_wire=FastWire
    )


def open_stores(settings: Settings) -> Stores:
    """Connect to the configured store. Raises StoreUnavailable."""
    return kvstore.connect.connect(settings.store_url_with_secret())


def _local_client(settings: Settings, models: Sequence[str], observe: Callable[[Event], None]) -> Client:
    """Start engines and workers for a few models, and return a client for them. Closing the client ends them.

    The workers are those of a cluster, but as threads on an in-process broker and store.

    For each model one engine does both stages and transfers the KV cache to itself, unless the model's table asks for
    two copies. Raises ConfigError if a model has no weights for a local engine.
    """
    server = EmbeddedServer()
    stores = kvstore.connect.connect("memory://")
    engines: dict[str, Engine] = {}
    workers: list[PrefillWorker | DecodeWorker] = []
    stack = ExitStack()
    is_closing = threading.Event()

    def tell(event: Event) -> None:
        # A job that a worker hands back to the queue during `close` is lost with this process, as expected, so it is
        # not reported.
        if not is_closing.is_set():
            observe(event)

    def load(model: ModelSettings) -> Engine:
        name, weights = model.weights_for()
        options = engine_options(model, name, weights, model.context, model.slots, model.prefill_slots)
        engine = open_engine(name, options)
        stack.callback(engine.close)
        return engine

    def start(make: Callable[..., PrefillWorker | DecodeWorker]) -> None:
        broker = EmbeddedBroker(server)
        worker = make(broker, stores.kv, stores.cluster_state, tell)
        # The worker is registered here, so that a caller sees it at once. Its thread renews the registration.
        stores.cluster_state.register(worker.registration(), REGISTRATION_TTL_S)
        thread = threading.Thread(target=worker.run, name=worker.worker_id, daemon=True)
        thread.start()
        workers.append(worker)
        stack.callback(broker.close)
        stack.callback(thread.join)

    def close() -> None:
        is_closing.set()
        for worker in workers:
            worker.stop(abort=True)
        stack.close()

    try:
        for name in models:
            model = settings.model(name)
            engines[name] = decoder = load(model)
            prefiller = load(model) if model.copies > 1 else decoder
            if why_no_kv := prove(prefiller, decoder):
                log.warning("model %s: no KV transfer: %s", name, why_no_kv)
            start(partial(PrefillWorker, name, LoadedEngine(prefiller, why_no_kv)))
            home = CachedModel(name, 0, LoadedEngine(decoder, why_no_kv))
            # No KV cache comes from another machine, so none needs checking.
            start(partial(DecodeWorker, ModelCache(home), kv_check_every=0))
        return Client(
            EmbeddedBroker(server),
            BestEffortClusterState(stores.cluster_state),
            models,
            observe,
            lambda model, text: engines[model].count_tokens(text),
            close,
        )
    except BaseException:
        close()
        raise


def engine_options(
    model: ModelSettings, engine: str, weights: str, context: int, slots: int, prefill_slots: int = 1
) -> EngineOptions:
    """Return the engine's options. Raises ConfigError for a bad key file."""
    key = model.api_key.reveal() if model.api_key and engine_entry(engine).takes_api_key else ""
    return EngineOptions(weights, context, slots, model.threads, model.allow_external, key, prefill_slots)

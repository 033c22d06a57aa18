"""The pipeline in one process: the same workers as on a cluster, but as threads on an in-process broker and store."""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import kvstore.connect
from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from engines.proof import prove
from engines.registry import Engine, open_engine
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from infra.config.settings import ModelSettings, Settings
from kvasir.engine_options import engine_options
from kvstore.cluster_state import BestEffortClusterState
from kvstore.heartbeat import REGISTRATION_TTL_S
from messages.lifecycle import Event
from prefill_worker.worker import PrefillWorker
from producers.client import Client

log = logging.getLogger(__name__)


def local_client(settings: Settings, models: Sequence[str], observe: Callable[[Event], None]) -> Client:
    """Start engines and workers for a few models, and return a client for them. Closing the client ends them.

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
        if not is_closing.is_set():  # jobs returned while closing are lost with the process, so they are not reported
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
        # The worker's thread renews its registration. This first one lets a caller see the worker at once.
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

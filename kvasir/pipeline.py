"""The pipeline in one process: the same workers as on a cluster, as threads, on an in-process broker and store."""

from __future__ import annotations

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


class LocalPipeline:
    """Engines and workers for a few models. One engine a model does both stages and transfers the KV cache to
    itself, unless the model's table asks for two copies.

    Raises ConfigError if a model has no weights for a local engine.
    """

    def __init__(self, settings: Settings, models: Sequence[str], observe: Callable[[Event], None]) -> None:
        self._settings = settings
        self._models = list(models)
        self._observe = observe
        self._server = EmbeddedServer()
        self._stores = kvstore.connect.connect("memory://")
        self._stack = ExitStack()
        self._engines: dict[str, Engine] = {}
        self._workers: list[PrefillWorker | DecodeWorker] = []
        try:
            for model in self._models:
                self._serve(model)
        except BaseException:
            self.close()
            raise

    def client(self) -> Client:
        """A client of this pipeline; closing it ends the pipeline."""
        return Client(
            EmbeddedBroker(self._server),
            BestEffortClusterState(self._stores.cluster_state),
            self._models,
            self._observe,
            lambda model, text: self._engines[model].count_tokens(text),
            self.close,
        )

    def close(self) -> None:
        """Stop the workers where they are, unload the engines. Idempotent."""
        for worker in self._workers:
            worker.stop(abort=True)
        self._stack.close()

    def _serve(self, model: str) -> None:
        model_settings = self._settings.model(model)
        decoder = self._load(model_settings)
        prefiller = self._load(model_settings) if model_settings.copies > 1 else decoder
        self._engines[model] = decoder
        why_no_kv = prove(prefiller, decoder)
        if why_no_kv:
            log.warning("model %s: no KV transfer: %s", model, why_no_kv)
        self._start(partial(PrefillWorker, model, LoadedEngine(prefiller, why_no_kv)))
        home = CachedModel(model, 0, LoadedEngine(decoder, why_no_kv))
        # No KV cache comes from elsewhere, so none is checked.
        self._start(partial(DecodeWorker, ModelCache(home), kv_check_every=0))

    def _load(self, model_settings: ModelSettings) -> Engine:
        name, weights = model_settings.weights_for()
        slots = model_settings.slots, model_settings.prefill_slots
        engine = open_engine(name, engine_options(model_settings, name, weights, model_settings.context, *slots))
        self._stack.callback(engine.close)
        return engine

    def _start(self, make: Callable[..., PrefillWorker | DecodeWorker]) -> None:
        broker = EmbeddedBroker(self._server)
        worker = make(broker, self._stores.kv, self._stores.cluster_state, self._observe)
        # Its own thread renews it. Put up here, it is there for whoever asks for the workers next.
        self._stores.cluster_state.register(worker.registration(), REGISTRATION_TTL_S)
        thread = threading.Thread(target=worker.run, name=worker.worker_id, daemon=True)
        thread.start()
        self._workers.append(worker)
        self._stack.callback(broker.close)
        self._stack.callback(thread.join)

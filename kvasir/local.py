"""The pipeline in one process: the same workers as on a cluster, as threads, on an in-process broker and store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import kvstore.connect
from decode_worker.worker import DecodeWorker
from engines.hand_over_proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from infra.embedded import EmbeddedBroker, EmbeddedServer
from infra.settings import ModelSettings, Settings
from kvstore.best_effort import BestEffortBoard
from messages.lifecycle import Moment
from prefill_worker.worker import PrefillWorker
from producers.client import Client

log = logging.getLogger(__name__)

LOCAL_KV_BYTES = 2 << 30


class LocalPipeline:
    """Engines and workers for a few models. One engine a model does both stages and hands the KV cache over to
    itself, unless the model's table asks for two copies.

    Raises ConfigError if a model has no weights for a local engine.
    """

    def __init__(self, settings: Settings, models: Sequence[str], observe: Callable[[Moment], None]) -> None:
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
            BestEffortBoard(self._stores.board),
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
        chosen = self._settings.model(model)
        decoder = self._load(chosen)
        prefiller = self._load(chosen) if chosen.copies > 1 else decoder
        self._engines[model] = decoder
        why_no_kv = prove(prefiller, decoder)
        if why_no_kv:
            log.warning("model %s: no hand-over: %s", model, why_no_kv)
        self._start(PrefillWorker, model, prefiller, why_no_kv)
        self._start(DecodeWorker, model, decoder, why_no_kv)

    def _load(self, chosen: ModelSettings) -> Engine:
        name, weights = chosen.weights_for()
        engine = open_engine(name, EngineOptions(weights, chosen.context, chosen.slots, chosen.threads))
        self._stack.callback(engine.close)
        return engine

    def _start(self, kind: type[PrefillWorker] | type[DecodeWorker], model: str, engine: Engine, why: str) -> None:
        broker = EmbeddedBroker(self._server)
        worker = kind(model, engine, broker, self._stores.kv, self._stores.board, self._observe, why)
        thread = threading.Thread(target=worker.run, name=f"{kind.__name__} {model}", daemon=True)
        thread.start()
        self._workers.append(worker)
        self._stack.callback(broker.close)
        self._stack.callback(thread.join)

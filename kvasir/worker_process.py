"""A worker as a process: load, prove, serve, leave in good order."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType

from decode_worker.residency import Stealable
from decode_worker.worker import DecodeWorker
from engines.family import in_family
from engines.hand_over_proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from infra.hours import Hours
from infra.settings import ModelSettings, Settings
from kvasir.connect import is_cluster, open_broker, open_stores
from kvasir.stealables import memory_bytes, stealables, weights_bytes
from kvasir.worker_page import PageOptions, worker_page
from kvstore.base import Board, KVStore
from kvstore.block_cache import CachedKVStore
from messages.cards import Role
from messages.errors import ConfigError, KvasirError
from messages.jobs import SHORT_PROMPT_TOKENS
from messages.lifecycle import Moment
from monitoring.events import fan_out
from prefill_worker.worker import PrefillWorker

log = logging.getLogger(__name__)

Worker = PrefillWorker | DecodeWorker


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What one worker process serves, and with what."""

    role: Role
    model: str
    engine: str = ""  # "": the model's default
    weights: str = ""  # "": the model's for this engine
    context: int = 0
    slots: int = 0
    grace_s: float = 60.0
    kv_cache_gb: float = 2.0  # shared blocks kept in memory
    page: PageOptions = field(default_factory=PageOptions)
    steal: tuple[str, ...] = ()  # models whose jobs a decode worker may take besides its own; "all"
    hours: Hours = field(default_factory=Hours)  # in which it takes jobs
    memory_gb: float = 0.0  # for the weights of all models in memory; 0: most of the machine's


def serve(settings: Settings, options: WorkerOptions, observe: Callable[[Moment], None]) -> None:
    """Run a worker until SIGTERM or SIGINT. The first signal lets it finish, the second (or `grace_s`) hands back.

    Raises ConfigError, BrokerUnavailable, StoreUnavailable if it can't start.
    """
    if not is_cluster(settings):
        raise ConfigError("a worker needs the cluster: set KVASIR_BROKER_URL=amqp://… and KVASIR_STORE_URL=redis://…")
    with ExitStack() as stack:
        page = stack.enter_context(worker_page(settings, options.page, options.role, options.model, options.steal))
        observe = fan_out(observe, page.metrics)
        broker = open_broker(settings, f"{options.role} {options.model}")
        stack.callback(broker.close)
        stores = open_stores(settings)
        stack.callback(stores.close)
        engine, weights = _load(settings, options)
        stack.callback(engine.close)
        why_no_kv = _checked(stores.board, options.model, engine)
        common = (options.model, engine, broker, _kv(stores.kv, options), stores.board, observe, why_no_kv)
        worker: Worker
        if options.role == "prefill":
            worker = PrefillWorker(*common, short_tokens=_short_tokens(settings, options.model))
        else:
            others = _others(settings, options, engine, stores.board)
            worker = DecodeWorker(*common, others, memory_bytes(options.memory_gb), weights_bytes(weights))
        worker.keep_hours(options.hours)
        page.loaded(worker.card, broker, stores.board)
        with _stopped_by_signals(worker, options.grace_s):
            log.info("%s worker %s serves %s on %s", options.role, worker.worker_id, options.model, engine.info.device)
            worker.run()
        log.info("worker %s has left", worker.worker_id)


def _load(settings: Settings, options: WorkerOptions) -> tuple[Engine, str]:
    """The worker's engine, and the weights that it loaded."""
    configured = settings.models.get(options.model)
    if configured is None and not (options.engine and options.weights):
        settings.model(options.model)  # raises, with what is configured
    name, weights = options.engine, options.weights
    if configured and not (name and weights):
        name, default = configured.weights_for(options.engine)
        weights = weights or default
    context = options.context or (configured.context if configured else 0)
    slots = 1 if options.role == "prefill" else options.slots or (configured.slots if configured else 4)
    threads = configured.threads if configured else 0
    engine = open_engine(name, EngineOptions(weights, context, slots, threads))
    return in_family(engine, options.model, configured.same_weights if configured else ()), weights


def _short_tokens(settings: Settings, model: str) -> int:
    configured = settings.models.get(model)
    return configured.short_prompt_tokens if configured else SHORT_PROMPT_TOKENS


def _others(settings: Settings, options: WorkerOptions, engine: Engine, board: Board) -> list[Stealable]:
    """What else this worker may serve, in its own number of slots."""

    def load(model: ModelSettings, name: str, weights: str) -> tuple[Engine, str]:
        options = EngineOptions(weights, model.context, engine.info.slots, model.threads)
        other: Engine = in_family(open_engine(name, options), model.name, model.same_weights)
        try:
            return other, _checked(board, model.name, other)
        except KvasirError:
            other.close()
            raise

    return stealables(settings, options.model, engine.info.engine, options.steal, load)


def _checked(board: Board, model: str, engine: Engine) -> str:
    """Why the engine hands nothing over; "": it does. Raises ConfigError if it has other weights than its peers."""
    _check_family(board, model, engine)
    why_no_kv = prove(engine, engine)
    if why_no_kv:
        log.warning("this worker hands nothing of %s over: %s", model, why_no_kv)
    return why_no_kv


def _kv(kv: KVStore, options: WorkerOptions) -> KVStore:
    """A worker keeps the class's blocks: a rubric crosses the network once to decode, and once to resume from."""
    size = int(options.kv_cache_gb * 1e9)
    return CachedKVStore(kv, size) if size else kv


def _check_family(board: Board, model: str, engine: Engine) -> None:
    """A queue serves one KV family: refuse to join workers whose caches ours could not read."""
    ours = engine.info.fingerprint
    for card in board.cards():
        if card.model == model and ours and card.fingerprint and card.fingerprint != ours:
            raise ConfigError(
                f"{card.role} worker {card.worker_id} serves {model} with other weights (its KV cache is of "
                f"{card.fingerprint:.12}, this one's of {ours:.12}): give both the same file, or serve yours under "
                "another model name"
            )


@contextmanager
def _stopped_by_signals(worker: Worker, grace_s: float) -> Iterator[None]:
    timer = threading.Timer(grace_s, worker.stop, kwargs={"abort": True})
    timer.daemon = True
    asked = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            return worker.stop(abort=True)
        asked.set()
        worker.stop()
        timer.start()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)

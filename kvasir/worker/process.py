"""Runs a worker as a process: loads the model, proves KV transfer, serves, and stops in good order."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

from decode_worker.stealing.models import CachedModel, ModelCache, Stealable
from decode_worker.worker import DecodeWorker
from engines.base import EngineInfo, LoadedEngine
from engines.family import in_family
from engines.proof import prove
from engines.registry import Engine, open_engine
from engines.sketch import Sketches
from engines.sketching import sketch_of
from engines.worker_info import MEND_ROPE, different_rope, ignored_window, kv_text, template_name
from infra.config.hours import Hours
from infra.config.settings import ModelSettings, Settings
from infra.quick_jobs import QuickJobs
from kvasir.connect import engine_options, is_cluster, open_broker, open_stores
from kvasir.measure import kept_links
from kvasir.worker.both_roles import TwoRoleWorker
from kvasir.worker.page import PageOptions, worker_page
from kvasir.worker.stealables import memory_bytes, stealables, weights_bytes
from kvstore.base import ClusterState, KVStore
from kvstore.cache import CachedKVStore
from kvstore.cluster_state import BestEffortClusterState
from messages.errors import ConfigError, KvasirError
from messages.lifecycle import Event
from messages.workers import BOTH_ROLES, WorkerStage
from monitoring.events import fan_out
from prefill_worker.worker import PrefillWorker

log = logging.getLogger(__name__)

Worker = PrefillWorker | DecodeWorker | TwoRoleWorker


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine and its options. "" and 0 mean as configured for the model."""

    engine: str
    weights: str
    context: int


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """The additional options of a decode worker."""

    slots: int = 0
    kv_cache_gb: float = 2.0  # memory for shared blocks
    steal: tuple[str, ...] = ()  # models whose jobs the worker is allowed to steal, or "all"
    memory_gb: float = 0.0  # limit for the weights of all models in memory; 0 means most of the machine's memory


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker process serves, and with which engine."""

    roles: tuple[WorkerStage, ...]
    model: str
    choice: EngineChoice
    page: PageOptions
    hours: Hours  # hours in which the worker takes jobs
    grace_s: float
    decode: DecodeOptions = DecodeOptions()


def serve(settings: Settings, options: WorkerOptions, observe: Callable[[Event], None]) -> None:
    """Run a worker until SIGTERM or SIGINT. The first signal lets it finish; the second (or `grace_s`) hands jobs back.

    Raises ConfigError, BrokerUnavailable, StoreUnavailable if it can't start.
    """
    if not is_cluster(settings):
        raise ConfigError(
            "a worker needs a cluster, but none is configured: set KVASIR_BROKER_URL=amqp://… and "
            "KVASIR_STORE_URL=redis://…"
        )
    with ExitStack() as stack:
        stage: WorkerStage = "decode" if "decode" in options.roles else "prefill"
        page = stack.enter_context(worker_page(settings, options.page, stage, options.model, options.decode.steal))
        observe = fan_out(observe, page.metrics)
        broker = open_broker(settings, f"{' and '.join(options.roles)} {options.model}")
        stack.callback(broker.close)
        stores = open_stores(settings)
        stack.callback(stores.close)
        model_settings = settings.models.get(options.model) or ModelSettings(name=options.model)
        engine, weights = _load(settings, options, model_settings)
        stack.callback(engine.close)
        kv, state = _kv(stores.kv, options), stores.cluster_state
        loaded_engine = _check_engine(state, options.model, engine)
        make_prefill = partial(
            PrefillWorker,
            *(options.model, loaded_engine, broker, kv, state, observe, model_settings.short_prompt_tokens, QuickJobs),
            free_bytes=int(model_settings.free_memory_gb * 1e9),
        )
        worker: Worker
        if stage == "prefill":
            worker = make_prefill()
            page.mark_loaded(worker.registration, broker, state)
        else:
            home = CachedModel(options.model, weights_bytes(weights), loaded_engine)
            stealable_models = _stealables_of(settings, options, engine, state)
            if not loaded_engine.why_no_kv:
                stores.kv.prepare()
            cache = ModelCache(home, stealable_models, memory_bytes(options.decode.memory_gb))
            make_decode = partial(
                DecodeWorker, cache, broker, kv, state, observe, model_settings.kv_check_every, QuickJobs
            )
            if options.roles == BOTH_ROLES:
                worker = TwoRoleWorker(make_prefill, make_decode, options.model, broker, state)
                page.mark_loaded(worker.decode.registration, broker, state, worker.prefill.registration)
            else:
                worker = make_decode()
                page.mark_loaded(worker.registration, broker, state)
        with _stopped_by_signals(worker, options.grace_s):
            named = " and ".join(options.roles)
            log.info("%s worker %s serves %s on %s", named, worker.worker_id, options.model, engine.info.device)
            worker.run(options.hours)
        log.info("worker %s has left", worker.worker_id)


def _load(settings: Settings, options: WorkerOptions, model: ModelSettings) -> tuple[Engine, str]:
    """Load the worker's engine, and return it with the name of its weights."""
    choice = options.choice
    name, weights = choice.engine, choice.weights
    if not (name and weights):
        # if the model is not configured, `settings.model` raises an error that names the configured models
        name, default = settings.model(model.name).weights_for(choice.engine)
        weights = weights or default
    # a role that this worker does not have gets 1 slot
    prefill_slots = model.prefill_slots if "prefill" in options.roles else 1
    slots = (options.decode.slots or model.slots) if "decode" in options.roles else 1
    context = choice.context or model.context
    engine = open_engine(name, engine_options(model, name, weights, context, slots, prefill_slots))
    return in_family(engine, model.name, model.same_weights), weights


def _stealables_of(
    settings: Settings, options: WorkerOptions, engine: Engine, cluster_state: ClusterState
) -> list[Stealable]:
    """Return the other models that this worker may serve in its slots."""

    def load(model: ModelSettings, name: str, weights: str) -> LoadedEngine[Engine]:
        options = engine_options(model, name, weights, model.context, engine.info.slots)
        candidate: Engine = in_family(open_engine(name, options), model.name, model.same_weights)
        try:
            return _check_engine(cluster_state, model.name, candidate)
        except KvasirError:
            candidate.close()
            raise

    return stealables(settings, options.model, engine.info.engine, options.decode.steal, load)


def _check_engine(cluster_state: ClusterState, model: str, engine: Engine) -> LoadedEngine[Engine]:
    """Return the engine with its sketch, or with the reason why it transfers no KV.

    Raises ConfigError if it has other weights than the workers that serve the model already.
    """
    check_family(cluster_state, model, engine.info)
    why_no_kv, sketch = prove(engine, engine), None
    if not why_no_kv:
        try:
            sketch = sketch_of(engine)
        except KvasirError as error:
            why_no_kv = f"what it computes could not be sketched: {error}"
    if why_no_kv:
        log.warning("this worker hands nothing of %s over: %s", model, why_no_kv)
    return LoadedEngine(
        engine,
        why_no_kv,
        Sketches(sketch, BestEffortClusterState(cluster_state)),
        template_name(engine),
        kept_links(),
    )


def _kv(kv: KVStore, options: WorkerOptions) -> KVStore:
    """Let the worker keep the class's blocks in memory.

    A shared prefix then crosses the network only once for decode, and once for prefill.
    """
    size = int(options.decode.kv_cache_gb * 1e9)
    return CachedKVStore(kv, size, keeps_puts=options.roles == BOTH_ROLES) if size else kv


def check_family(cluster_state: ClusterState, model: str, info: EngineInfo) -> None:
    """Check that this worker can read the KV caches of the other workers of its model: a queue serves one KV family."""
    own_fingerprint = info.fingerprint
    for registration in cluster_state.registrations():
        if (
            registration.model == model
            and own_fingerprint
            and registration.fingerprint
            and registration.fingerprint != own_fingerprint
        ):
            layouts = (registration.engine, registration.layout), (info.engine, kv_text(info))
            conflict = f"{registration.role} worker {registration.worker_id} serves {model} already"
            if window := ignored_window(*layouts):
                raise ConfigError(f"{conflict}: {window}; use the same engine for prefill and decode")
            if rope := different_rope(*layouts):
                raise ConfigError(f"{conflict}: {rope}; {MEND_ROPE}")
            raise ConfigError(
                f"{registration.role} worker {registration.worker_id} serves {model} with other weights (fingerprint "
                f"{registration.fingerprint:.12}; here {own_fingerprint:.12}): give both workers the same file, "
                "or serve this worker's file under another model name"
            )


@contextmanager
def _stopped_by_signals(worker: Worker, grace_s: float) -> Iterator[None]:
    timer = threading.Timer(grace_s, worker.stop, kwargs={"abort": True})
    timer.daemon = True
    stop_requested = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if stop_requested.is_set():
            return worker.stop(abort=True)
        stop_requested.set()
        worker.stop()
        timer.start()

    old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in old_handlers.items():
            signal.signal(number, handler)

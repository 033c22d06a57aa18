"""Looks a cluster over before work starts: configuration, broker, store, and the workers' cards. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from engines.catalogue import BY_NAME
from engines.gguf_file import read_gguf
from engines.ollama_models import SCHEME, check_dialect, find_gguf
from infra import topology
from infra.broker import Broker
from infra.settings import ModelSettings, Settings
from kvasir.connect import is_cluster, open_broker, open_stores
from kvasir.doctor_pairs import check_workers
from kvasir.findings import Finding, error, ok, warn
from kvstore.connect import Stores
from kvstore.redis_client import errors_mapped, open_client, place
from messages.errors import BrokerUnavailable, ConfigError, StoreUnavailable

_CLOCKS_DIFFER_S = 5.0
_FIRST_STEP = "see that it runs, and that its URL, user and password are right (kvasir config)"


def examine(load: Callable[[], Settings]) -> Iterator[Finding]:
    """Every finding. `load` reads the settings; nothing is raised for what is found to be wrong."""
    try:
        settings = load()
        cluster = is_cluster(settings)
    except ConfigError as wrong:
        yield error("configuration", str(wrong), "mend the setting that it names")
        return
    yield from _check_configuration(settings)
    if cluster:
        yield from _check_cluster(settings)
    else:
        yield ok("broker", "none is configured: everything runs in this process")
        for model in settings.models.values():
            yield _check_local_model(model)


def _check_configuration(settings: Settings) -> Iterator[Finding]:
    if not settings.models:
        yield error("configuration", "no model is configured", 'add a table [models."NAME"] to kvasir.toml')
        return
    yield ok("configuration", f"read; models: {', '.join(sorted(settings.models))}")
    for key in ("code_model", "feedback_model"):
        try:
            getattr(settings, key)()
        except ConfigError as wrong:
            yield warn("configuration", str(wrong), f"set {key} in [grading]; until then grade needs a flag")


def _check_local_model(model: ModelSettings) -> Finding:
    """Whether this machine can load it."""
    try:
        engine, weights = model.weights_for()
        entry = BY_NAME[engine]
        if entry.missing:
            return error(model.name, f"the {engine} engine is not installed", entry.missing)
        _check_weights(engine, weights)
    except ConfigError as wrong:
        return error(model.name, str(wrong), "mend its weights in kvasir.toml")
    return ok(model.name, f"{engine} can load {weights}")


def _check_weights(engine: str, weights: str) -> None:
    """Raises ConfigError for files that are missing, damaged, or not for this engine. URLs and hub names pass."""
    if engine == "llamacpp" and not weights.startswith(("http://", "https://")):
        name = weights.removeprefix("llama-server:")
        check_dialect(read_gguf(find_gguf(name.removeprefix(SCHEME)) if name.startswith(SCHEME) else Path(name)))


def _check_cluster(settings: Settings) -> Iterator[Finding]:
    try:
        broker = open_broker(settings, "doctor")
    except (BrokerUnavailable, ConfigError) as away:
        yield error("broker", str(away), _FIRST_STEP)
    else:
        try:
            yield from _check_broker(broker, list(settings.models))
        except BrokerUnavailable as away:
            yield error("broker", str(away), _FIRST_STEP)
        finally:
            broker.close()
    try:
        stores = open_stores(settings)
    except (StoreUnavailable, ConfigError) as away:
        yield error("store", str(away), _FIRST_STEP)
        return
    try:
        yield from _check_stores(settings, stores)
    except StoreUnavailable as away:
        yield error("store", str(away), _FIRST_STEP)
    finally:
        stores.close()


def _check_broker(broker: Broker, models: list[str]) -> Iterator[Finding]:
    work = [spec.name for spec in topology.queues(models) if spec.exchange == topology.WORK]
    absent = [name for name in work if broker.depth(name) is None]
    if absent:
        yield warn("broker", f"reached; {len(absent)} of {len(work)} work queues don't exist yet", "start a worker")
    else:
        yield ok("broker", f"reached; all {len(work)} work queues are there")
    ends = {
        topology.DEAD_LETTERS: ("jobs are dead letters", "read why they failed: kvasir dead list"),
        topology.RESULTS_PARKED: ("results wait for whoever submitted them", "run that batch's command again"),
    }
    for queue, (what, todo) in ends.items():
        depth = broker.depth(queue)
        if depth and depth.ready:
            yield warn("broker", f"{depth.ready:,} {what}", todo)


def _check_stores(settings: Settings, stores: Stores) -> Iterator[Finding]:
    url = settings.store_url_with_secret()
    client = open_client(url)
    try:
        with errors_mapped(place(url)):
            info: Any = client.info()
            saves = _setting(client, "save")
    finally:
        client.close()
    yield ok("store", f"reached; Redis {info['redis_version']}")
    yield from check_redis(info, saves)
    yield check_clock(stores.board.now() - time.time())
    yield from check_workers(settings, stores.board.cards())


def _setting(client: Any, name: str) -> str:
    """A server setting; "" where reading it is forbidden, as it is on managed services."""
    try:
        return str(client.config_get(name).get(name, ""))
    except ResponseError:
        return ""


def check_redis(info: dict[str, Any], saves: str) -> Iterator[Finding]:
    """What `INFO` and the setting `save` say of how Redis treats a full memory, and whether it writes to disk."""
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", ""))
    if not limit:
        yield warn("store", "maxmemory is not set: prefill can't tell when it is full", "redis: maxmemory 128gb, or so")
    if policy != "noeviction":
        yield error(
            "store",
            f"maxmemory-policy is {policy}: it throws away KV caches that waiting jobs need, and workers' cards",
            "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
        )
    if saves or info.get("aof_enabled"):
        yield warn(
            "store",
            f"it writes KV caches to disk ({'appendonly yes' if info.get('aof_enabled') else f'save {saves}'}), "
            "and may need twice the memory meanwhile",
            'redis.conf: save "" and appendonly no: everything in it can be computed again',
        )
    if limit and policy == "noeviction" and not saves and not info.get("aof_enabled"):
        yield ok(
            "store", f"{int(info['used_memory']) / 1e9:.2f} of {limit / 1e9:.1f} GB used; noeviction, no persistence"
        )


def check_clock(difference_s: float) -> Finding:
    """The store's clock minus this machine's."""
    if abs(difference_s) < _CLOCKS_DIFFER_S:
        return ok("store", f"its clock is this machine's ({difference_s:+.1f} s)")
    return warn(
        "store",
        f"its clock differs from this machine's by {difference_s:+,.0f} s: deadlines go by the store's",
        "let all machines keep time by NTP",
    )

"""Looks a cluster over before work starts: configuration, broker, store, disks, and the workers' registrations.

Leaves everything as it was: one message and 16 MB of random bytes go out and come back.
"""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from engines.registry import entries
from infra.broker import topology
from infra.config.next_command import next_command
from infra.config.settings import ModelSettings, Settings
from kvasir.connect import is_cluster, open_broker, open_stores
from kvasir.doctor.addresses import check_addresses
from kvasir.doctor.findings import Finding, error, ok, warn
from kvasir.doctor.members import check_members
from kvasir.doctor.pairs import check_workers
from kvasir.doctor.services import (
    check_broker_itself,
    check_clock,
    check_journal_disk,
    check_link,
    check_other_clocks,
    check_publishing,
    check_slot_disk,
    check_store_servers,
    clock_difference_s,
)
from kvasir.engine_options import engine_options
from kvstore.connect import Stores
from messages.codec import VERSION
from messages.errors import BrokerUnavailable, ConfigError, StoreUnavailable
from producers.client import version_problems
from producers.words import plural

if TYPE_CHECKING:
    from infra.broker.rabbitmq import RabbitMQBroker

_OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO
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
    yield from _check_password_files(settings)
    yield check_journal_disk(Path("results"))
    if cluster:
        yield from check_addresses(settings)
        yield from _check_cluster(settings)
    else:
        yield ok("broker", "none is configured: everything runs in this process")
        for model in settings.models.values():
            yield _check_local_model(model)
        if any(_has_slot_files(engine) for model in settings.models.values() for engine in model.weights):
            yield check_slot_disk()


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


def _check_password_files(settings: Settings) -> Iterator[Finding]:
    for secret in (settings.services.broker_secret, settings.services.store_secret):
        path = secret.file if secret else None
        if path and path.is_file() and path.stat().st_mode & _OTHER_USERS:
            yield warn("configuration", f"others than you may read the password in {path}", f"chmod 600 {path}")


def _check_local_model(model: ModelSettings) -> Finding:
    """Whether this machine can load it."""
    try:
        engine, weights = model.weights_for()
        entry = entries()[engine]
        if command := entry.install_command(weights):
            return error(model.name, f"the {engine} engine is not installed", command)
        message, todo = entry.check(engine_options(model, engine, weights, model.context, model.slots))
    except ConfigError as wrong:
        return error(model.name, str(wrong), "mend its weights in kvasir.toml")
    return warn(model.name, message, todo) if todo else ok(model.name, message)


def _has_slot_files(engine: str) -> bool:
    entry = entries().get(engine)
    return entry is not None and entry.has_slot_files


def _check_cluster(settings: Settings) -> Iterator[Finding]:
    try:
        with closing(open_broker(settings, "doctor")) as broker:
            yield from _check_broker(broker, list(settings.models))
            if broker.is_clustered:
                yield from check_members(settings.broker_url_with_secret(), settings.services.broker_nodes)
    except (BrokerUnavailable, ConfigError) as problem:
        yield error("broker", str(problem), _FIRST_STEP)
    try:
        with closing(open_stores(settings)) as stores:
            yield from _check_stores(settings, stores)
    except (StoreUnavailable, ConfigError) as problem:
        yield error("store", str(problem), _FIRST_STEP)


def _check_broker(broker: RabbitMQBroker, models: list[str]) -> Iterator[Finding]:
    yield from check_broker_itself(broker.server)
    yield check_publishing(broker)
    work = [spec.name for spec in topology.queues(models) if spec.exchange == topology.WORK]
    absent = [name for name in work if broker.depth(name) is None]
    if absent:
        message = f"reached; of {plural(len(work), 'work queue')} {len(absent)} not declared yet"
        yield warn("broker", message, "start a worker")
    else:
        yield ok("broker", f"reached; all {len(work)} work queues are there")
    parked_queue = topology.RESULTS_PARKED_QUORUM if broker.is_clustered else topology.RESULTS_PARKED
    ends = {
        topology.DEAD_LETTERS: ("dead letter", "", f"read why they failed: {next_command('dead', 'list')}"),
        parked_queue: ("result", " that nobody has fetched", "run its batch's command again"),
    }
    for queue, (noun, suffix, todo) in ends.items():
        depth = broker.depth(queue)
        if depth and depth.ready:
            yield warn("broker", f"{plural(depth.ready, noun)}{suffix}", todo)


def _check_stores(settings: Settings, stores: Stores) -> Iterator[Finding]:
    url = settings.store_url_with_secret()
    yield from check_store_servers(url)
    yield check_link(url)
    registrations = stores.cluster_state.registrations()
    yield check_clock(clock_difference_s(stores.cluster_state.now))
    if registrations:
        yield check_other_clocks()
    if any(
        registration.host == socket.gethostname() and _has_slot_files(registration.engine)
        for registration in registrations
    ):
        yield check_slot_disk()
    problems = version_problems(stores.cluster_state)
    for problem, todo in problems:
        yield error("versions", problem, todo)
    if registrations and not problems:
        yield ok("versions", f"{plural(len(registrations), 'worker')} registered, all of message version {VERSION}")
    yield from check_workers(settings, registrations, stores.cluster_state.get_sketch)

"""Checks a cluster before work starts: configuration, broker, store, disks, and the workers' registrations.

It leaves no traces: some messages and 34 MB of random bytes are sent, 66 MB are fetched, and all is removed again.
Broker and store are checked in parallel. A check that has not finished in time is named instead of waited for.
"""

import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engines.registry import entries
from infra.broker import topology
from infra.config.next_command import next_command
from infra.config.settings import ModelSettings, Settings
from kvasir.connect import engine_options, is_cluster, open_broker, open_stores
from kvasir.doctor.findings import Finding, error, ok, warn
from kvasir.doctor.members import check_members
from kvasir.doctor.pairs import check_workers
from kvasir.doctor.services import (
    check_broker_itself,
    check_clock,
    check_journal_disk,
    check_link,
    check_other_clocks,
    check_slot_disk,
    check_store_servers,
    clock_difference_s,
    measured_link,
)
from kvasir.doctor.steps import try_service
from kvasir.missing import missing_workers
from kvstore.connect import Stores
from kvstore.redis.client import is_cluster as is_redis_cluster
from messages.codec import VERSION
from messages.errors import BrokerUnavailable, ConfigError, StoreUnavailable, UsageError
from messages.urls import addresses
from messages.workers import Link
from producers.client import version_problems
from producers.words import plural

if TYPE_CHECKING:
    from infra.broker.rabbitmq import RabbitMQBroker

_OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO
_FIRST_STEP = "see that it runs, and that its URL, user and password are right (kvasir config)"
# Time limit for all checks over the network.
_WITHIN_S = 7.0
# If a finding has one of these causes, or none, the service still works well enough for further checks.
_USABLE = ("", "latency", "rights", "undeclared")

Look = Callable[[], Iterable[Finding]]


def examine(load: Callable[[], Settings]) -> Iterator[Finding]:
    """Yield all findings. `load` reads the settings. Problems become findings and are not raised."""
    try:
        settings = load()
        cluster = is_cluster(settings)
    except ConfigError as wrong:
        yield error("configuration", str(wrong), "fix the setting that it names")
        return
    yield from _check_configuration(settings)
    yield from _check_password_files(settings)
    yield check_journal_disk(Path("results"))
    if cluster:
        yield from side_by_side(
            {
                "broker": partial(_check_service, "broker", settings),
                "store": partial(_check_service, "store", settings),
            },
            _WITHIN_S,
        )
    else:
        yield ok("broker", "none is configured: everything runs in this process")
        yield from map(_check_local_model, settings.models.values())
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
            yield warn("configuration", f"other users may read the password in {path}", f"chmod 600 {path}")


def _check_local_model(model: ModelSettings) -> Finding:
    """Check whether this machine can load the model."""
    try:
        engine, weights = model.weights_for()
        entry = entries()[engine]
        if command := entry.install_command(weights):
            return error(model.name, f"the {engine} engine is not installed", command)
        message, todo = entry.check(engine_options(model, engine, weights, model.context, model.slots))
    except ConfigError as wrong:
        return error(model.name, str(wrong), "fix its weights in kvasir.toml")
    return warn(model.name, message, todo) if todo else ok(model.name, message)


def _has_slot_files(engine: str) -> bool:
    entry = entries().get(engine)
    return entry is not None and entry.has_slot_files


def side_by_side(looks: Mapping[str, Look], within_s: float) -> Iterator[Finding]:
    """Run checks in parallel and yield their findings in order. A check that takes longer is abandoned and named."""
    findings: dict[str, list[Finding]] = {subject: [] for subject in looks}
    finished: set[str] = set()

    def run(subject: str) -> None:
        findings[subject].extend(looks[subject]())
        finished.add(subject)

    threads = {subject: threading.Thread(target=run, args=(subject,), daemon=True) for subject in looks}
    deadline = time.monotonic() + within_s
    for thread in threads.values():
        thread.start()
    for subject, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        is_done = subject in finished
        yield from list(findings[subject])
        if not is_done:
            yield warn(subject, f"the checks did not finish within {within_s:g} s", "try again when less is going on")


def _check_service(service: Literal["broker", "store"], settings: Settings) -> Iterator[Finding]:
    """Try each address step by step. If one of them works, check the service behind it."""
    try:
        tries = _try_addresses(service, settings)
        yield from tries.values()
        usable = {
            address: service_finding for address, service_finding in tries.items() if service_finding.cause in _USABLE
        }
        if service == "broker" and usable:
            with closing(open_broker(settings, "doctor")) as broker:
                yield from _check_broker(broker, list(settings.models))
                if broker.is_clustered:
                    yield from check_members(settings.broker_url_with_secret(), settings.services.broker_nodes)
        elif usable:
            with closing(open_stores(settings)) as stores:
                yield from _check_stores(settings, stores, usable)
    except (BrokerUnavailable, StoreUnavailable, ConfigError) as problem:
        yield error(service, str(problem), _FIRST_STEP)
        return
    servers = {service_finding.server for service_finding in tries.values() if service_finding.server}
    if len(servers) > 1 and service == "broker":
        todo = "jobs in the one are out of reach at the other: name only nodes of one cluster, or links to one node"
        yield error("broker", f"its addresses lead to {len(servers)} brokers: {', '.join(sorted(servers))}", todo)
    elif len(servers) > 1:
        todo = "fine as a reserve: no job is lost, but what the other one lacks is computed again"
        yield warn("store", f"its addresses lead to {len(servers)} Redis servers or clusters", todo)


def measured_links(settings: Settings) -> Iterator[Link]:
    """Measure the links from this machine to each address of the broker and the store.

    Raises ConfigError, StoreUnavailable, and UsageError if a service fails for another reason than a message's size.
    """
    for service in ("broker", "store"):
        for url, steps in _try_addresses(service, settings).items():
            if steps.stopped_at and steps.cause not in (*_USABLE, "mtu", "slow_link"):
                raise UsageError(f"{steps.what}: {steps.todo}")
            yield measured_link(url, steps, most_mb=64, within_s=30.0)


def _try_addresses(service: Literal["broker", "store"], settings: Settings) -> dict[str, Finding]:
    """Return a finding for each address. As long as another address works, errors become warnings."""
    urls = addresses(settings.broker_url_with_secret() if service == "broker" else settings.store_url_with_secret())
    # the store's certificate file is named in its URL
    ca_file = settings.broker_ca_file() if service == "broker" else ""
    with ThreadPoolExecutor(len(urls)) as pool:  # all at the same time; each try has a time limit
        tries = list(pool.map(lambda url: try_service(service, url, ca_file), urls))
    if len(urls) == 1:
        return {urls[0]: tries[0]}
    has_reserve = any(service_finding.cause in _USABLE for service_finding in tries)
    return {
        url: replace(
            service_finding,
            level="warn" if has_reserve and service_finding.level == "error" else service_finding.level,
            what=f"address {number} of {len(urls)}, {service_finding.what}",
        )
        for number, (url, service_finding) in enumerate(zip(urls, tries, strict=True), 1)
    }


def _check_broker(broker: "RabbitMQBroker", models: list[str]) -> Iterator[Finding]:
    yield from check_broker_itself(broker.server)
    work = [spec.name for spec in topology.queues(models) if spec.exchange == topology.WORK]
    absent = [name for name, depth in broker.depths(*work).items() if depth is None]
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
        if count := broker.ready(queue):
            yield warn("broker", f"{plural(count, noun)}{suffix}", todo)


def _check_stores(settings: Settings, stores: Stores, tries: Mapping[str, Finding]) -> Iterator[Finding]:
    """Check the store. `tries` are the findings about the addresses that work."""
    url = settings.store_url_with_secret()
    yield from check_store_servers(url)
    for address, steps in list(tries.items())[: 1 if is_redis_cluster(url) else None]:
        if steps.cause != "rights":
            yield check_link(address, steps)
    registrations = stores.cluster_state.registrations()
    yield check_clock(clock_difference_s(stores.cluster_state.now))
    if registrations:
        yield check_other_clocks()
        yield from (
            warn("workers", sentence, "look at its process and its log on that machine")
            for sentence in missing_workers(settings, stores.cluster_state)
        )
    if any(
        registration.host == socket.gethostname() and _has_slot_files(registration.engine)
        for registration in registrations
    ):
        yield check_slot_disk()
    problems = version_problems(stores.cluster_state)
    yield from (error("versions", problem, todo) for problem, todo in problems)
    if registrations and not problems:
        yield ok("versions", f"{plural(len(registrations), 'worker')} registered, all of message version {VERSION}")
    yield from check_workers(settings, registrations, stores.cluster_state.get_sketch)

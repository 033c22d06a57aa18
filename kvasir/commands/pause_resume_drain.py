"""`pause`, `resume`, `drain`: keep a machine from taking jobs for a while, without ending its workers."""

import time
from collections.abc import Callable
from contextlib import closing

import click

from infra.broker.base import Broker
from infra.broker.control import announce_pause
from kvasir.connect import is_cluster, open_broker, open_stores
from kvasir.options import Globals, Number
from kvasir.terminal import say
from kvstore.base import ClusterState
from messages.errors import BrokerUnavailable, UsageError
from messages.workers import WorkerInfo

_ASK_EVERY_S = 1.0
_HEARD_WITHIN_S = 30.0


@click.command()
@click.argument("worker")
@click.pass_obj
def pause(global_options: Globals, worker: str) -> int:
    """Keep WORKER from taking jobs until `resume`, or until its process ends. It finishes what it has begun.

    WORKER is an id from `kvasir status`, or a host: all workers there.
    """
    return _pause_or_resume(global_options, worker, should_pause=True)


@click.command()
@click.argument("worker")
@click.pass_obj
def resume(global_options: Globals, worker: str) -> int:
    """Let WORKER (see `pause`) take jobs again."""
    return _pause_or_resume(global_options, worker, should_pause=False)


@click.command()
@click.argument("worker")
@click.option("--timeout", "timeout_s", type=Number(0), default=3600.0, show_default=True, metavar="SECONDS")
@click.pass_obj
def drain(global_options: Globals, worker: str, timeout_s: float) -> int:
    """Pause WORKER (see `pause`), and wait until it holds no job: its machine can then be used or turned off."""
    return _pause_or_resume(global_options, worker, should_pause=True, until_idle_s=timeout_s)


def _pause_or_resume(global_options: Globals, worker: str, should_pause: bool, until_idle_s: float = 0.0) -> int:
    settings = global_options.settings()
    if not is_cluster(settings):
        raise UsageError("no broker is configured, so there are no workers to pause: set KVASIR_BROKER_URL")
    with closing(open_stores(settings)) as stores, closing(open_broker(settings, "pause")) as broker:
        _broadcast_pause(broker, stores.cluster_state, worker, should_pause)
        for registration in _matching_workers(stores.cluster_state, worker):
            say(f"{registration.worker_id}: {registration.off or 'takes jobs'}")
        if until_idle_s:
            _wait(
                lambda: (
                    not any(
                        registration.busy or registration.jobs
                        for registration in _matching_workers(stores.cluster_state, worker, may_be_gone=True)
                    )
                ),
                until_idle_s,
                f"{worker} is still at work after {until_idle_s:,.0f} s; it stays paused",
            )
            say(f"{worker} holds no job")
    return 0


def _broadcast_pause(broker: Broker, cluster_state: ClusterState, worker: str, should_pause: bool) -> None:
    """Repeat the message until the registrations show its effect, because a broadcast may get lost.

    Raises BrokerUnavailable if they never do.
    """
    _matching_workers(cluster_state, worker)

    def has_arrived() -> bool:
        announce_pause(broker, worker, should_pause)
        return all(
            (registration.off == "paused") == should_pause for registration in _matching_workers(cluster_state, worker)
        )

    verb = "pause" if should_pause else "resume"
    _wait(
        has_arrived,
        _HEARD_WITHIN_S,
        f"{worker} did not {verb} within {_HEARD_WITHIN_S:.0f} s: is it reaching the broker?",
    )


def _matching_workers(cluster_state: ClusterState, worker: str, may_be_gone: bool = False) -> list[WorkerInfo]:
    registrations = cluster_state.registrations()
    workers = [
        registration
        for registration in registrations
        if registration.worker_id == worker or registration.worker_id.startswith(f"{worker}.")
    ]
    if not workers and not may_be_gone:
        alive_ids = ", ".join(registration.worker_id for registration in registrations) or "none"
        raise UsageError(f"there is no worker {worker!r}; live workers: {alive_ids}")
    return workers


def _wait(condition: Callable[[], bool], timeout_s: float, timeout_message: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BrokerUnavailable(timeout_message)
        time.sleep(_ASK_EVERY_S)

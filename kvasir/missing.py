"""Finds workers that should be running but are not: lost within the last hour, or expected by kvasir.toml."""

from collections.abc import Iterator

from desk.estimate import duration
from infra.config.settings import Settings
from kvstore.base import ClusterState
from kvstore.heartbeat import REGISTRATION_TTL_S
from messages.workers import WorkerInfo
from producers.words import join_with_and, plural


def missing_workers(settings: Settings, cluster_state: ClusterState) -> list[str]:
    """Return one sentence for each.

    A lost worker is not missing if it was started again on the same host for the same role. If that one was lost too,
    it alone is named.
    """
    workers, now = cluster_state.registrations(), cluster_state.now()
    lost_registrations = sorted(cluster_state.lost_registrations(), key=lambda loss: loss[0])
    last_losses = {(worker.host, worker.role, worker.model): (at, worker) for at, worker in lost_registrations}
    losses = [
        (ended_at, worker)
        for ended_at, worker in last_losses.values()
        if not any(
            (successor.host, successor.role, successor.model) == (worker.host, worker.role, worker.model)
            and successor.started_at > ended_at - REGISTRATION_TTL_S
            for successor in workers
        )
    ]
    lost_hosts = {worker.host for _, worker in losses}
    return [
        *(_sentence(now - ended_at, worker, workers) for ended_at, worker in losses),
        *_not_as_configured(settings, workers, lost_hosts),
    ]


def _sentence(age_s: float, lost_worker: WorkerInfo, workers: list[WorkerInfo]) -> str:
    heirs = sorted({worker.host for worker in workers if {*worker.jobs} & {*lost_worker.jobs}})
    jobs = f", held {plural(len(lost_worker.jobs), 'job')}" if lost_worker.jobs else ""
    jobs += f", taken over by {join_with_and(heirs)}" if heirs else ""
    return f"{lost_worker.host} gone for {duration(age_s)}: its {lost_worker.role} worker of {lost_worker.model}{jobs}."


def _not_as_configured(settings: Settings, workers: list[WorkerInfo], lost_hosts: set[str]) -> Iterator[str]:
    """Yield the machines without a configured worker, unless something else was said about them.

    A host may use any name for itself. So nothing is reported if a model has as many workers of a role as configured.
    """
    roles = [(machine, role) for machine in settings.machines.values() for role in machine.roles if role.stages]
    configured_roles = [(role.stages[-1], role.model) for _, role in roles]  # a role with both stages counts as decode
    for machine, role in roles:
        hosts = [worker.host for worker in workers if (worker.role, worker.model) == (role.stages[-1], role.model)]
        is_known = any(map(machine.is_called, (*hosts, *lost_hosts)))
        if not is_known and len(hosts) < configured_roles.count((role.stages[-1], role.model)):
            yield f"{machine.name} has no {role.kind} of {role.model}, which kvasir.toml expects there."

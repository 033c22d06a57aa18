"""Which workers should be there and are not: who was lost within the hour, and whom kvasir.toml expects."""

from collections.abc import Iterator

from desk.estimate import duration
from infra.config.settings import Settings
from kvstore.base import ClusterState
from kvstore.heartbeat import REGISTRATION_TTL_S
from messages.workers import WorkerInfo
from producers.words import join_with_and, plural


def missing_workers(settings: Settings, cluster_state: ClusterState) -> list[str]:
    """A sentence for each. What was lost and has been started again, there and for the same, is not missing."""
    alive, lost, now = cluster_state.registrations(), cluster_state.lost_registrations(), cluster_state.now()
    gone = [
        (ended_at, worker)
        for ended_at, worker in lost
        if not any(
            (other.host, other.role, other.model) == (worker.host, worker.role, worker.model)
            and other.started_at > ended_at - REGISTRATION_TTL_S
            for other in alive
        )
    ]
    return [
        *(_loss(now - ended_at, worker, alive) for ended_at, worker in gone),
        *_unseen(settings, alive, {worker.host for _, worker in gone}),
    ]


def _loss(age_s: float, worker: WorkerInfo, alive: list[WorkerInfo]) -> str:
    heirs = sorted({other.host for other in alive if {*other.jobs} & {*worker.jobs}})
    jobs = f", held {plural(len(worker.jobs), 'job')}" if worker.jobs else ""
    heirs_named = f", taken over by {join_with_and(heirs)}" if heirs else ""
    return f"{worker.host} gone for {duration(age_s)}: its {worker.role} worker of {worker.model}{jobs}{heirs_named}."


def _unseen(settings: Settings, alive: list[WorkerInfo], lost_hosts: set[str]) -> Iterator[str]:
    """Machines of the configuration without a worker that they should have, and of which nothing else was said.

    A host may call itself anything. So all is well where a model has as many workers of a role as it should.
    """
    expected = [(machine, role) for machine in settings.machines.values() for role in machine.roles if role.stages]
    for machine, role in expected:
        hosts = [worker.host for worker in alive if (worker.role, worker.model) == (role.stages[-1], role.model)]
        count = sum((other.model, other.stages[-1]) == (role.model, role.stages[-1]) for _, other in expected)
        names = {host.split(".")[0] for host in (*hosts, *lost_hosts)}
        if len(hosts) < count and not names & {machine.name, machine.host.split(".")[0]}:
            yield f"{machine.name} has no {role.kind} of {role.model}, which kvasir.toml expects there."

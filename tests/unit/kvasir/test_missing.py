"""Who is missing: the workers lost within the hour, and those that kvasir.toml expects."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.config.settings import Settings, load_settings
from kvasir.missing import missing_workers
from kvstore.memory import MemoryClusterState
from messages.workers import WorkerInfo, WorkerStage

MACHINE = """
[machines.{name}]
host = "{host}"
roles = [{{ role = "{role}", model = "m:7b", engine = "simulated" }}]
"""


def worker(host: str, role: WorkerStage = "decode", started_at: float = 0.0, jobs: tuple[str, ...] = ()) -> WorkerInfo:
    name = f"{host.split('.')[0]}.{started_at:.0f}"
    return WorkerInfo(
        name, role, "m:7b", "simulated", "cpu", "", "", 8, 4, host, 1, started_at, busy=len(jobs), jobs=jobs
    )


class Memory(MemoryClusterState):
    """A cluster state that has lost workers, each so many seconds ago."""

    def __init__(self, alive: list[WorkerInfo], lost: list[tuple[float, WorkerInfo]]) -> None:
        super().__init__()
        for registration in alive:
            self.register(registration, 60)
        self._lost = [(self.now() - age_s, registration) for age_s, registration in lost]

    def lost_registrations(self) -> list[tuple[float, WorkerInfo]]:
        return self._lost


def settings(tmp_path: Path, *machines: tuple[str, str, str]) -> Settings:
    config = tmp_path / "kvasir.toml"
    config.write_text('[models."m:7b"]\nweights.simulated = "sim:"\n' + "".join(
        MACHINE.format(name=name, host=host, role=role) for name, host, role in machines
    ))  # fmt: skip
    return load_settings(config=config, environ={})


def test_a_lost_worker_is_named_with_its_jobs_and_who_has_them_now(tmp_path: Path) -> None:
    lost = worker("mac2", jobs=("a", "b", "c"))
    alive = [worker("mac1", jobs=("b", "x")), worker("mac3", jobs=("y",))]
    assert missing_workers(settings(tmp_path), Memory(alive, [(40, lost)])) == [
        "mac2 gone for 40 s: its decode worker of m:7b, held 3 jobs, taken over by mac1."
    ]
    assert missing_workers(settings(tmp_path), Memory([], [(600, replace(lost, jobs=()))])) == [
        "mac2 gone for 10 min: its decode worker of m:7b."
    ]


def test_of_two_losses_of_one_worker_the_last_is_named(tmp_path: Path) -> None:
    first, second = worker("mac2", jobs=("a",)), worker("mac2", started_at=300.0, jobs=("b", "c"))
    assert missing_workers(settings(tmp_path), Memory([], [(30, second), (400, first)])) == [
        "mac2 gone for 30 s: its decode worker of m:7b, held 2 jobs."
    ]


@pytest.mark.parametrize(
    ("again", "missing"),
    [
        (worker("mac2", started_at=1e11), 0),
        (worker("mac2", started_at=2.0), 1),  # it ran beside the one that was lost
        (worker("mac2", "prefill", started_at=1e11), 1),
        (worker("mac1", started_at=1e11), 1),
    ],
    ids=["the same", "another one", "another role", "elsewhere"],
)
def test_what_was_started_again_is_not_missing(tmp_path: Path, again: WorkerInfo, missing: int) -> None:
    assert len(missing_workers(settings(tmp_path), Memory([again], [(40, worker("mac2"))]))) == missing


def test_machines_of_the_configuration_are_expected(tmp_path: Path) -> None:
    expected = settings(tmp_path, ("mac1", "10.0.0.1", "decode"), ("spark1", "spark1.lan", "prefill"))
    sentences = [
        "mac1 has no decode worker of m:7b, which kvasir.toml expects there.",
        "spark1 has no prefill worker of m:7b, which kvasir.toml expects there.",
    ]
    assert missing_workers(expected, Memory([], [])) == sentences
    assert missing_workers(expected, Memory([worker("spark1.local", "prefill")], [])) == sentences[:1]
    # A host may have any name
    everybody = [worker("spark1.local", "prefill"), worker("Adas-Mac")]
    assert missing_workers(expected, Memory(everybody, [])) == []
    # Of a worker that was lost there is one sentence
    assert len(missing_workers(expected, Memory(everybody[1:], [(4, everybody[0])]))) == 1


def test_a_worker_with_both_roles_is_expected_once(tmp_path: Path) -> None:
    expected = settings(tmp_path, ("mac1", "mac1", "worker"), ("mac2", "mac2", "worker"))
    alive = [worker("mac1"), replace(worker("mac1", "prefill"), worker_id="mac1.0.prefill")]
    assert missing_workers(expected, Memory(alive, [])) == [
        "mac2 has no worker with both roles of m:7b, which kvasir.toml expects there."
    ]


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("mac1", True), ("Mac1.local", True), ("10.0.0.7", True), ("10.0.0.8", False), ("10", False), ("mac10", False)],
)
def test_a_host_is_a_machine_by_its_name_or_its_whole_address(tmp_path: Path, host: str, is_it: bool) -> None:
    machine = settings(tmp_path, ("mac1", "10.0.0.7", "decode")).machines["mac1"]
    assert machine.is_called(host) == is_it

"""`kvasir logs` over real ssh: the last lines of each role's log on each machine, and what is written meanwhile."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from messages.jobs import JobResult
from monitoring import logs
from producers.batch.batch import Batch, BatchEntry
from tests.support.processes import CompletedCommand, RunningProcess, environment, run
from tests.support.servers import free_port
from tests.support.sockets import processes_of
from tests.support.sshd import Sshd
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

MACHINE = """
[machines.{name}]
host = "{name}"
platform = "{platform}"
supervisor = "{supervisor}"
roles = [{roles}]
"""
PREFILL, DECODE = (f'{{ role = "{role}", model = "m:1b", engine = "simulated" }}' for role in ("prefill", "decode"))


class Site:
    """Two machines with logs, as deployments leave them, and one that is away."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.ssh_config = folder / "ssh_config"
        self.config = folder / "kvasir.toml"
        self.machines = {
            name: stack.enter_context(Sshd(name, self._new(name), self.ssh_config)) for name in ("one", "two")
        }
        with self.ssh_config.open("a") as file:
            file.write(f"Host away\n  HostName 127.0.0.1\n  Port {free_port()}\n")
        self.config.write_text(
            '[models."m:1b"]\nweights.simulated = "sim:"\n'
            + MACHINE.format(name="one", platform="linux", supervisor="plain", roles=f"{PREFILL}, {DECODE}")
            + MACHINE.format(name="two", platform="macos", supervisor="launchd", roles=DECODE)
            + MACHINE.format(name="away", platform="linux", supervisor="plain", roles=f"{PREFILL}, {DECODE}")
        )
        for name, role in (("one", "prefill"), ("one", "decode"), ("two", "decode")):
            self.write(name, role, *(f"line {number} of {name}'s {role}" for number in range(30)))

    def _new(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir()
        return made

    def write(self, machine: str, role: str, *lines: str) -> None:
        log = self.machines[machine].home / "kvasir" / "log" / f"kvasir-{role}-m-1b.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--config", str(self.config), "logs", "--ssh-config", str(self.ssh_config))

    def logs(self, *arguments: str) -> CompletedCommand:
        return run(*self.arguments, *arguments, env=environment(self.folder), cwd=self.folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory.mktemp("logs"), stack)


def test_each_line_has_its_machine_and_a_machine_that_is_away_stops_nobody(site: Site) -> None:
    done = site.logs("-n", "2")
    assert set(done.stdout.splitlines()) == {
        f"{name} {role}-m-1b | line {number} of {name}'s {role}"
        for name, role in (("one", "prefill"), ("one", "decode"), ("two", "decode"))
        for number in (28, 29)
    }
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("kvasir: away: ")
    assert "refused" in sentence
    assert done.code == 1


def test_one_machine_alone(site: Site) -> None:
    done = site.logs("two")
    assert done.code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 20
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"two"}


def test_an_unknown_machine_and_a_role_that_has_not_spoken_are_named(site: Site) -> None:
    done = site.logs("three")
    assert done.code == 2
    assert "there is no machine 'three' in the configuration; configured machines: one, two, away" in done.stderr
    log = site.machines["two"].home / "kvasir/log/kvasir-decode-m-1b.log"
    log.rename(site.folder / "aside")
    try:
        done = site.logs("two")
    finally:
        (site.folder / "aside").rename(log)
    assert (done.code, done.stdout) == (1, "")
    assert "kvasir-decode-m-1b has written no log yet" in done.stderr


def test_following_shows_what_comes_until_ctrl_c_and_leaves_nothing_behind(site: Site) -> None:
    following = RunningProcess([*site.arguments, "--follow", "-n", "1"], environment(site.folder), site.folder)
    wait_until(lambda: following.text().count("line 29") == 3, "the last lines are shown", 60)
    site.write("one", "decode", "news of one")
    site.write("two", "decode", "news of two")
    wait_until(lambda: "one decode-m-1b | news of one\n" in following.text(), "one's news", 30)
    wait_until(lambda: "two decode-m-1b | news of two\n" in following.text(), "two's news", 30)
    assert "kvasir: away: " in following.text()

    following.send(signal.SIGINT)

    assert following.wait() == 0
    assert "Traceback" not in following.text()
    homes = [machine.home for machine in site.machines.values()]
    wait_until(lambda: not any(_commands(home, "tail") for home in homes), "no tail is left there", 15)


def _event(age_s: float, event: str, job: str, batch: str = "b1") -> str:
    """A line as workers write it, of a time that has passed."""
    record = logging.LogRecord("monitoring.jobs", logging.INFO, "", 0, event, (), None)
    record.created = time.time() - age_s
    record.job = {"job": job, "batch": batch, "model": "m:1b", "waited_s": 0.5}
    return logs._FORMATTERS["json"]().format(record)


@pytest.fixture(scope="module")
def events(site: Site) -> dict[str, str]:
    job, other = f"{7:032x}", f"{8:032x}"
    site.write("one", "prefill", _event(500, "prefill_started", job), _event(450, "prefill_started", other, "b2"))
    site.write("two", "decode", _event(200, "decode_started", job), "Traceback", _event(100, "answered", job))
    site.write("one", "decode", _event(150, "decode_started", other, "b2"), _event(3, "redelivered", job, "b\x1b1"))
    return {"job": job, "other": other}


def test_a_job_is_found_on_all_machines_in_order_of_time(site: Site, events: dict[str, str]) -> None:
    done = site.logs("--job", events["job"])
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()] == [
        "one prefill-m-1b", "two decode-m-1b", "two decode-m-1b", "one decode-m-1b",
    ]  # fmt: skip
    words = [line.split(" | ")[1].split() for line in done.stdout.splitlines()]
    assert [line[2] for line in words] == ["prefill_started", "decode_started", "answered", "redelivered"]
    assert all(f"job={events['job']}" in line for line in words)
    assert "\x1b" not in done.stdout  # what a terminal would obey
    assert done.code == 1  # one machine is away
    assert done.stderr.startswith("kvasir: away: ")


def test_a_batch_and_a_time_can_be_asked_for(site: Site, events: dict[str, str]) -> None:
    done = site.logs("one", "--batch", "b2")
    assert [line.split()[5] for line in done.stdout.splitlines()] == ["prefill_started", "decode_started"]
    done = site.logs("one", "two", "--since", "4m")
    # What has no time belongs to what came before it; what came before the events has none at all
    assert [line.split(" | ")[1].split()[-1] for line in done.stdout.splitlines()] == [
        "waited_s=0.5", "Traceback", "waited_s=0.5", "waited_s=0.5", "waited_s=0.5",
    ]  # fmt: skip
    assert "decode_started" in done.stdout.splitlines()[0]
    assert events["other"] in done.stdout
    assert "prefill_started" not in done.stdout
    assert site.logs("one", "--since", "soon").code == 2
    assert site.logs("one", "--since", "4m", "--follow").code == 2


def test_a_job_tells_its_life(site: Site, events: dict[str, str]) -> None:
    with Batch(site.folder / "results" / "hw") as batch:
        batch.plan([BatchEntry(events["job"], "s17.code", "m:1b", "code", "s17.R")], {})
        batch.journal.record([JobResult(events["job"], 1, batch.batch_id, "s17.code", "m:1b", "succeeded")])

    done = run(
        "--config", str(site.config), "job", events["job"][:-1], "--ssh-config", str(site.ssh_config),
        env=environment(site.folder), cwd=site.folder,
    )  # fmt: skip

    first, *life, last = done.stdout.splitlines()
    assert first == f"job {events['job']}: s17.code of results/hw, for m:1b"
    assert [line.split()[2] for line in life] == ["prefill_started", "decode_started", "answered", "redelivered"]
    assert life[0].endswith("waited_s=0.5 (one prefill-m-1b)")
    assert last.startswith("It succeeded: ")
    assert done.code == 0, done.stderr


def _commands(home: Path, name: str) -> list[int]:
    return [pid for pid in processes_of(home) if Path(f"/proc/{pid}/comm").read_text().strip() == name]

"""Which cause doctor names for the step at which a service stops, and how it stops."""

import errno
import os
import socket
import threading
import time

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError

from kvasir.commands.engines import print_findings
from kvasir.doctor.cluster import side_by_side
from kvasir.doctor.findings import Finding, ok
from kvasir.doctor.steps import STEPS, ServiceCheck, diagnose, try_service
from messages.errors import BrokerUnavailable, ConfigError, NoQueue, StoreUnavailable
from tests.support.servers import HOST, free_port

BROKER = "amqp://kvasir:secret@mac1:5673/"
WELL = dict.fromkeys(("resolve", "connect", "log in", "8 KB", "1 MB", "confirm"), 0.001)


def stopped(step: str, failure: Exception | None = None, cause: Exception | None = None) -> ServiceCheck:
    """An check whose earlier steps were quick."""
    if failure is not None:
        failure.__cause__ = cause
    seconds = dict.fromkeys(STEPS[: STEPS.index(step)], 0.001)
    return ServiceCheck("broker", BROKER, seconds, stopped_at=step, failure=failure)


def unreachable(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("check", "cause"),
    [
        # No answer
        (stopped("resolve"), "dns"),
        (stopped("connect"), "cut"),
        (stopped("connect", TimeoutError("timed out")), "cut"),
        (stopped("TLS"), "tls"),
        (stopped("log in"), "hangs"),
        (stopped("8 KB"), "mtu"),
        (
            stopped("8 KB", BrokerUnavailable("no confirmation from the broker within 3 s; 1 message is unconfirmed")),
            "mtu",
        ),
        (stopped("1 MB", BrokerUnavailable("reading x: the broker did not answer in time")), "slow_link"),
        (stopped("confirm"), "no_confirm"),
        # A refusal, by the system, TLS, the broker or the store
        (stopped("resolve", socket.gaierror(socket.EAI_AGAIN, "later")), "dns"),
        (stopped("resolve", socket.gaierror(socket.EAI_NONAME, "unknown")), "unknown_name"),
        (stopped("connect", ConnectionRefusedError(errno.ECONNREFUSED, "refused")), "refused"),
        (stopped("connect", unreachable(errno.EHOSTUNREACH)), "host_down"),
        (stopped("connect", unreachable(errno.ENETUNREACH)), "host_down"),
        (stopped("log in", ConfigError("its certificate is not trusted (self-signed)")), "tls"),
        (stopped("log in", ConfigError("user name or password refused")), "login"),
        (stopped("log in", ConfigError("no access to the virtual host (530)")), "rights"),
        (stopped("log in", StoreUnavailable("refused"), AuthenticationError("WRONGPASS")), "login"),
        (stopped("log in", ConfigError("there is no password for the broker's user 'x'")), "lost"),
        (stopped("8 KB", ConfigError("the broker answered 403 ACCESS_REFUSED")), "rights"),
        (stopped("8 KB", NoQueue("the broker answered 404")), "undeclared"),
        (stopped("confirm", StoreUnavailable("is full"), OutOfMemoryError("OOM")), "store_full"),
        (stopped("confirm", StoreUnavailable("refused"), NoPermissionError("NOPERM")), "rights"),
        (stopped("1 MB", BrokerUnavailable("reset by peer")), "lost"),
        # Slow, or all is well
        (ServiceCheck("broker", BROKER, WELL | {"resolve": 5.0}), "dns_slow"),
        (ServiceCheck("broker", BROKER, {"resolve": 5.0}, stopped_at="log in"), "dns_slow"),
        (ServiceCheck("broker", BROKER, WELL | {"connect": 0.6}), "latency"),
        (ServiceCheck("broker", BROKER, WELL | {"1 MB": 4.0}), ""),
        (ServiceCheck("broker", BROKER, WELL), ""),
        # What the broker says itself
        (ServiceCheck("broker", BROKER, {}, stopped_at="8 KB", alarm="low on memory"), "memory_alarm"),
        (ServiceCheck("broker", BROKER, {}, stopped_at="1 MB", alarm="low on disk"), "disk_alarm"),
        (ServiceCheck("broker", BROKER, {}, stopped_at="connect", is_there=True), "firewall"),
    ],
)
def test_the_step_and_the_way_it_stops_make_the_cause(check: ServiceCheck, cause: str) -> None:
    finding = diagnose(check)
    assert finding.cause == cause
    # And where something is wrong, it says where, what and what to do, and never the password
    assert (finding.level == "ok") == (cause == "") == (finding.todo == "")
    assert finding.what.startswith("mac1:5673: ")
    assert check.stopped_at in finding.what
    assert "secret" not in repr(finding) + repr(check)
    assert "{" not in finding.what + finding.todo


def test_a_port_where_nobody_listens_and_a_listener_that_says_nothing_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvasir.doctor.steps.WITHIN_S", 0.3)
    refused = try_service("store", f"redis://{HOST}:{free_port()}/0")
    with socket.create_server((HOST, 0)) as server:
        silent = try_service("store", f"redis://{HOST}:{server.getsockname()[1]}/0")
    assert (refused.cause, silent.cause, silent.stopped_at) == ("refused", "hangs", "log in")
    assert set(silent.steps) == {"resolve", "connect"}


def test_looks_run_side_by_side_and_one_that_hangs_is_named() -> None:
    release = threading.Event()

    def look(subject: str, wait_s: float) -> list[Finding]:
        release.wait(wait_s)
        return [ok(subject, "seen")]

    start = time.monotonic()
    found = list(side_by_side({"a": lambda: look("a", 60), "b": lambda: look("b", 0)}, 0.2))
    release.set()
    assert time.monotonic() - start < 30
    assert [(finding.level, finding.subject) for finding in found] == [("warn", "a"), ("ok", "b")]
    assert "the checks did not finish" in found[0].what


def test_the_steps_are_a_line_for_each_service(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([diagnose(ServiceCheck("store", "redis://mac1/0", WELL)), diagnose(stopped("8 KB"))])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["store", "1", "1", "–", "1", "1", "1", "1"]
    assert lines[2] == ["broker", "1", "1", "1", "1", "no", "–", "–"]

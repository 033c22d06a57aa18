"""What `kvasir doctor` says of brokers, clocks, links and disks, each from what it was told of them."""

import time
from pathlib import Path
from typing import Any

import pytest

from kvasir.doctor.services import (
    check_broker_itself,
    check_clock,
    check_journal_disk,
    check_other_clocks,
    clock_difference_s,
    disk_finding,
)

CAPABLE = dict.fromkeys(("publisher_confirms", "consumer_cancel_notify", "connection.blocked"), True)
RABBITMQ = {"product": "RabbitMQ", "version": "3.10.8", "cluster_name": "rabbit@mac1", "capabilities": CAPABLE}


@pytest.mark.parametrize(
    ("server", "level", "words"),
    [
        ({}, "ok", "RabbitMQ 3.10.8, cluster rabbit@mac1, with confirms"),
        ({"version": "4.1.0-rc.1"}, "ok", "4.1.0-rc.1"),
        ({"version": "3.9.29"}, "error", "older than"),
        ({"version": "nightly"}, "error", "older than"),
        ({"capabilities": CAPABLE | {"publisher_confirms": False}}, "error", "lacks publisher_confirms"),
    ],
)
def test_a_broker_is_known_by_what_it_says_when_connected_to(server: dict[str, Any], level: str, words: str) -> None:
    [finding] = check_broker_itself(RABBITMQ | server)
    assert finding.level == level
    assert words in finding.what
    assert finding.todo


@pytest.mark.parametrize(("seconds", "level"), [(0.4, "ok"), (-1.9, "ok"), (2.1, "warn"), (-90.0, "warn")])
def test_clocks_two_seconds_apart_are_found(seconds: float, level: str) -> None:
    finding = check_clock(seconds)
    assert finding.level == level
    assert f"{seconds:+,.0f} s" in finding.what or level == "ok"


def test_a_clock_is_compared_with_the_middle_of_the_call() -> None:
    assert abs(clock_difference_s(time.time)) < 1
    assert clock_difference_s(lambda: time.time() + 60) == pytest.approx(60, abs=1)


def test_what_can_not_be_known_of_clocks_is_said() -> None:
    assert "workers' machines can't be read from here" in check_other_clocks().what
    assert "timedatectl" in check_other_clocks().todo


@pytest.mark.parametrize(("free", "level"), [(5e9, "ok"), (0.5e9, "warn"), (0.05e9, "error")])
def test_a_disk_that_fills_is_found(free: float, level: str) -> None:
    assert disk_finding("journals", Path("/var"), free, wanted_bytes=1e9).level == level


def test_the_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    assert f"free in {tmp_path} for" in check_journal_disk(tmp_path / "results" / "homework-4").what

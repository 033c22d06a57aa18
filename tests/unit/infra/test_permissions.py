"""The roles' rights name what exists, and keep apart what must be kept apart."""

import re
import shlex

import pytest

from infra.broker import topology
from infra.deploy.permissions import PERMISSIONS, STORE_RULES, AccountRole, main, set_permissions

QUEUES = [spec.name for spec in topology.queues(["tiny:1b", "org/other-7b"])] + ["reply.hw1", "stream.ask-1"]
EXCHANGES = [spec.name for spec in topology.exchanges()] + ["amq.default"]  # as the broker calls the nameless one


def may(role: AccountRole, what: str, names: list[str]) -> set[str]:
    """Those of these names that a role's pattern lets through, as the broker matches: anywhere in the name."""
    pattern = getattr(PERMISSIONS[role], what)
    return {name for name in names if re.search(pattern, name)}


def test_only_the_operator_can_change_or_delete_what_lasts() -> None:
    lasting = [name for name in QUEUES if not name.startswith(("reply.", "stream."))] + EXCHANGES

    assert may("operator", "configure", lasting) == set(lasting)
    for role in ("producer", "prefill", "decode", "monitor"):
        assert may(role, "configure", lasting) == set()


def test_dead_letters_are_the_operators_to_read() -> None:
    assert [role for role in PERMISSIONS if may(role, "read", [topology.DEAD_LETTERS])] == ["operator"]


def test_workers_read_no_results_and_producers_no_work() -> None:
    work = {name for name in QUEUES if name.startswith(("prefill.", "decode.", "suspects."))}
    results = {"reply.hw1", topology.RESULTS_PARKED}

    assert may("producer", "read", QUEUES) == results | {"stream.ask-1"}
    assert may("prefill", "read", QUEUES) == {name for name in work if "decode" not in name} | {topology.DEATHS}
    assert may("decode", "read", QUEUES) == work | {topology.DEATHS}


def test_a_monitor_reads_and_writes_nothing() -> None:
    for what in ("configure", "write", "read"):
        assert may("monitor", what, QUEUES + EXCHANGES) == set()


def test_nobody_but_the_operator_writes_past_our_exchanges() -> None:
    ours = {"kvasir.work", "kvasir.reply", "kvasir.control"}
    retries = {f"kvasir.{topology.retry_level(seconds)}" for seconds in topology.RETRY_LEVELS_S}

    assert may("producer", "write", EXCHANGES) == ours | {"kvasir.parked"}
    assert may("prefill", "write", EXCHANGES) == ours | retries | {"kvasir.dead"}
    assert may("decode", "write", EXCHANGES) == ours | retries | {"kvasir.dead", "kvasir.stream"}


@pytest.mark.parametrize("role", list(PERMISSIONS))
def test_the_command_gives_a_user_its_roles_rights(role: AccountRole) -> None:
    given = PERMISSIONS[role]

    command = set_permissions(role, "somebody", "grading")

    assert command == ["set_permissions", "-p", "grading", "somebody", given.configure, given.write, given.read]


def test_the_commands_for_both_services_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grading"]) == 0
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[:5] for words in printed if words[0] == "rabbitmqctl"] == [
        ["rabbitmqctl", "set_permissions", "-p", "grading", f"kvasir-{role}"] for role in PERMISSIONS
    ]
    assert {words[3].removeprefix("kvasir-"): " ".join(words[4:]) for words in printed if words[0] == "redis-cli"} == (
        STORE_RULES
    )

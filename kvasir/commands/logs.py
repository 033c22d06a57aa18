"""`kvasir logs`: the last lines of each role's log on the machines of kvasir.toml, over ssh."""

import queue
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path

import click

from infra.config.settings import MachineSettings, Settings
from infra.deploy.remote import DeployFailed, Remote
from infra.deploy.services import service_units
from infra.deploy.units import Unit, supervisor_of, units_of
from kvasir.options import Globals, ssh_config_option
from messages.errors import UsageError

# One of several: what a role said, why there is nothing more to come, or that it has said all.
LogMessage = tuple[str, list[str] | DeployFailed | None]


@click.command()
@click.argument("machines", nargs=-1, metavar="[MACHINE]...")
@click.option("-n", "--lines", type=click.IntRange(0), default=20, show_default=True, help="Of each role's log.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on, until Ctrl-C.")
@ssh_config_option
@click.pass_obj
def logs(global_options: Globals, machines: tuple[str, ...], lines: int, follow: bool, ssh_config: Path | None) -> int:
    """Show the last lines of each role's log on MACHINE, or on all machines of kvasir.toml; over ssh, all at once.

    Before each line stand its machine and role. A machine that can't be reached is named, and the others go on.

    \b
    kvasir logs                      every role's last 20 lines
    kvasir logs mac1 -n 5 --follow   those of one machine, and what comes
    """
    settings = global_options.settings()
    selected_machines = select_machines(settings, machines)
    roles = [
        (machine, unit)
        for machine in selected_machines
        for unit in (*service_units(machine, settings), *units_of(machine))
    ]
    if not roles:
        raise UsageError("no machine in the configuration has a role: add [machines.NAME] with roles")
    log_queue: queue.Queue[LogMessage] = queue.Queue()
    remotes: list[Remote] = []

    def listen(machine: MachineSettings, unit: Unit) -> None:
        name = f"{machine.name} {unit.name.removeprefix('kvasir-')}"
        try:
            remotes.append(remote := Remote(machine, ssh_config))
            log_lines = remote.lines(_script(machine, unit, lines, follow))
            for chunk in ([line] for line in log_lines) if follow else [list(log_lines)]:
                log_queue.put((name, chunk))
            log_queue.put((name, None))
        except DeployFailed as error:
            log_queue.put((name, error))

    for role in roles:
        threading.Thread(target=listen, args=role, daemon=True).start()
    try:
        return _print_logs(log_queue, len(roles))
    except KeyboardInterrupt:
        if follow:
            return 0
        raise
    finally:
        for remote in remotes:
            remote.hang_up()


def select_machines(settings: Settings, names: Sequence[str]) -> list[MachineSettings]:
    """Those that were named, or all, in the order of the configuration. Raises UsageError for an unknown one."""
    unknown_names = [name for name in names if name not in settings.machines]
    if unknown_names:
        machine_names = ", ".join(settings.machines) or "none"
        raise UsageError(f"there is no machine {unknown_names[0]!r} in the configuration; it has: {machine_names}")
    return [machine for machine in settings.machines.values() if not names or machine.name in names]


def _script(machine: MachineSettings, unit: Unit, lines: int, follow: bool) -> str:
    if supervisor_of(machine) == "systemd":
        # Only root sees all of a service's log; whoever may not ask as root sees what the worker itself wrote.
        check = "j=journalctl; if sudo -n -l journalctl >/dev/null 2>&1; then j='sudo -n journalctl'; fi"
        show = f"$j --quiet --no-pager --output cat --lines {lines} --unit {unit.name}{' --follow' if follow else ''}"
    else:
        path = shlex.quote(f"{machine.folder}/log/{unit.name}.log")
        path = path if machine.folder.startswith("/") else f'"$HOME"/{path}'
        check = f"[ -e {path} ] || {{ echo '{unit.name} has written no log yet' >&2; exit 1; }}"
        show = f"tail -n {lines} {'-F ' if follow else ''}{path} 2>/dev/null"
    if not follow:
        return f"{check}; {show}"
    # Without a terminal nothing tells a process that nobody listens any more; here the end of the input does.
    return (
        f"{check}; exec 3<&0; {{ exec {show}; }} & said=$!; {{ read -r _ <&3; kill $said; }} & ear=$!; "
        "wait $said; code=$?; kill $ear; exit $code"
    )


def _print_logs(log_queue: queue.Queue[LogMessage], open_logs: int) -> int:
    """Until each has ended; 1 if one of them could not be asked."""
    failures: set[str] = set()
    while open_logs:
        name, message = log_queue.get()
        if isinstance(message, list):
            click.echo("".join(f"{name} | {line}\n" for line in message), nl=False)
            continue
        open_logs -= 1
        if message and str(message) not in failures:  # roles of one machine are not reached for one reason
            click.echo(f"kvasir: {message}", err=True)
            failures.add(str(message))
    return int(bool(failures))

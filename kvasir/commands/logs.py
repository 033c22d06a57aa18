"""`kvasir logs` and `kvasir job`: show logs from the machines of kvasir.toml over ssh, and what happened to a job."""

import queue
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from infra.config.next_command import next_command
from infra.config.settings import MachineSettings, Settings
from infra.deploy.remote import DeployFailed, Remote
from infra.deploy.services import service_units
from infra.deploy.units import Unit, supervisor_of, units_of
from kvasir.commands.status import cluster_state, remarks
from kvasir.commands.top_batches import batch_folders
from kvasir.connect import connect, is_cluster
from kvasir.options import Globals, path, ssh_config_option
from kvasir.terminal import say
from messages import codec
from messages.errors import UsageError
from messages.jobs import JobResult
from monitoring.logs import TIME_FIRST, as_console_line
from producers.batch.batch import Batch, id_or_folder
from producers.client import Client

# (role's name, content). The content is lines of the role's log, the reason why the log can't be read, or None at the
# log's end.
LogMessage = tuple[str, list[str] | DeployFailed | None]

_FIELDS_OF_ALL = (
    "job",
    "batch",
    "model",
    "stage",
    "run",
    "lane",
)  # `kvasir job` leaves these fields out, because they are equal in all lines of a job, or implied by the line's event
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhd])", value)
    if value and not match:
        raise click.BadParameter(f"{value!r} is not a time: give a number followed by s, m, h or d, such as 10m")
    return int(match[1]) * _SECONDS[match[2]] if match else 0.0


@click.command()
@click.argument("machines", nargs=-1, metavar="[MACHINE]...")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Show this many lines of each role's log.",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option(
    "--job", "of_job", default="", metavar="ID", help="Show only this job's lines, from all machines, in order of time."
)
@click.option(
    "--batch", "of_batch", default="", metavar="ID", help="Show only the lines of this batch. ID is its id or folder."
)
@click.option(
    "--since",
    "since_s",
    default="",
    metavar="TIME",
    callback=_seconds,
    help="Show only lines that are at most this old, such as 90s, 10m, 2h or 1d.",
)
@ssh_config_option
@click.pass_obj
def logs(
    global_options: Globals,
    machines: tuple[str, ...],
    lines: int,
    follow: bool,
    of_job: str,
    of_batch: str,
    since_s: float,
    ssh_config: Path | None,
) -> int:
    """Show the last lines of each role's log on MACHINE, or on all machines of kvasir.toml; over ssh, all at once.

    Before each line stand its machine and role. A machine that can't be reached is named, and the others go on.

    \b
    kvasir logs                      every role's last 20 lines
    kvasir logs mac1 -n 5 --follow   those of one machine, and what comes
    """
    settings, failures = global_options.settings(), set[str]()
    looks_for = lines_with(of_job, id_or_folder(of_batch), since_s=since_s)
    if looks_for and follow:
        raise UsageError("--follow can't be used with --job, --batch or --since, because it shows only new lines")
    if looks_for:
        for name, line in lines_in_order(settings, looks_for, ssh_config, failures, machines):
            click.echo(f"{name} | {as_console_line(line)}")
        return int(bool(failures))
    try:
        for name, chunk in _listen(settings, machines, ssh_config, failures, lines, follow):
            click.echo("".join(f"{name} | {line}\n" for line in chunk), nl=False)
    except KeyboardInterrupt:
        if not follow:
            raise
        return 0
    return int(bool(failures))


@click.command()
@click.argument("job_id", metavar="ID")
@click.option(
    "--batch", "folder", type=path, help="Look for the job in this batch's folder [default: all folders in results/]."
)
@ssh_config_option
@click.pass_obj
def job(global_options: Globals, job_id: str, folder: Path | None, ssh_config: Path | None) -> None:
    """Tell a job's life: what happened to it, who had it, where it is, and why it waits.

    ID is a job's id, or the start of one that is in a batch's folder. What happened is read from the logs of the
    machines of kvasir.toml, over ssh.
    """
    settings = global_options.settings()
    batch, entry = next(
        (
            (batch, entry)
            for batch in (Batch(place, is_owner=False) for place in ([folder] if folder else batch_folders()))
            for entry in batch.entries
            if entry.job_id.startswith(job_id)
        ),
        (None, None),
    )
    job_id, model = (entry.job_id, entry.model) if entry else (job_id, "")
    say(f"job {job_id}: {f'{entry.item_id} of {batch.folder}, for {model}' if batch and entry else 'of no batch here'}")
    events = lines_in_order(settings, lines_with(job_id), ssh_config, set()) if settings.machines else []
    for name, line in events[-8:]:
        say(f"{as_console_line(line, _FIELDS_OF_ALL)} ({name})")
    result = batch.result(job_id) if batch else None
    if result or not is_cluster(settings):
        return say(_ending(result) if result else "It has no result, and without a broker nothing runs now.")
    with connect(settings, (), name="job") as client:
        for sentence in _whereabouts(settings, client, batch, job_id, model):
            say(sentence)


def _whereabouts(settings: Settings, client: Client, batch: Batch | None, job_id: str, model: str) -> Iterator[str]:
    """Yield sentences on where an unfinished job is, and why it waits there."""
    if batch and not batch.is_confirmed(job_id):
        yield f"It was never sent: {batch.go_on_command} does that."
    # If nobody is decoding the job, this call claims it for a millisecond.
    ((body, _),) = client.cluster_state.take_up(
        "kvasir-job", [(job_id, batch.runs.get(job_id, 1) if batch else 1)], ttl_s=0.001
    )
    if body:
        yield f"{_ending(codec.decode(body, JobResult))} That is in the store, and on its way to its batch's owner."
    holders = [worker for worker in client.workers() if job_id in worker.jobs]
    yield from (f"{holder.worker_id} has it now, for {holder.role}." for holder in holders)
    if body or holders:
        return
    state = cluster_state(settings, client)
    yield f"Nobody has it now; if it has died, this says of what: {next_command('dead', 'show', job_id)}"
    yield from (f"{ready:,} wait in {queue}." for queue, ready in state["queues"].items() if ready and model in queue)
    yield from remarks(state)


def _ending(result: JobResult) -> str:
    prefill, decode, error = result.prefill, result.decode, result.error
    if error:
        return f"It failed at {error.stage} after {result.attempts} attempts: {error.kind}: {error.message}."
    return (
        f"It {result.state}: prefilled by {prefill.worker_id or 'nobody'} in {prefill.prefill_s:.1f} s, decoded by "
        f"{decode.worker_id or 'nobody'} in {decode.decode_s:.1f} s, {decode.total_s:.1f} s in all; KV transfer: "
        f"{decode.why_none or decode.kv_transfer}."
    )


def lines_with(*words: str, since_s: float = 0.0) -> str:
    """Return a shell pipeline that filters a log: lines with all these words, at most `since_s` old; "" for no filter.

    A line without a time, such as one of a traceback, belongs to the line before it.
    """
    filters = [f"grep -F -e {shlex.quote(word)}" for word in words if word]
    if since_s:
        start = TIME_FIRST + (datetime.now(UTC) - timedelta(seconds=since_s)).isoformat()
        filters.append(f"LC_ALL=C awk -v start={shlex.quote(start)} '/^[{{]/ {{ on = $0 >= start }} on'")
    return " | ".join(["", *filters, "tail -n 10000"]) if filters else ""


def lines_in_order(
    settings: Settings, looks_for: str, ssh_config: Path | None, failures: set[str], machines: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Return the lines of all roles' logs that the filter `looks_for` leaves, each with its machine and role.

    The lines are sorted by their machines' clocks.
    """
    rows: list[tuple[str, str, str]] = []
    for name, chunk in _listen(settings, machines, ssh_config, failures, looks_for=looks_for):
        timed_line = ""
        for line in chunk:
            timed_line = line if line.startswith(TIME_FIRST) else timed_line
            rows.append((timed_line, name, line))
    return [(name, line) for _, name, line in sorted(rows, key=lambda row: row[0])]


def select_machines(settings: Settings, names: Sequence[str]) -> list[MachineSettings]:
    """Return the named machines, or all, in the order of the configuration. Raises UsageError for an unknown name."""
    unknown_names = [name for name in names if name not in settings.machines]
    if unknown_names:
        machine_names = ", ".join(settings.machines) or "none"
        raise UsageError(
            f"there is no machine {unknown_names[0]!r} in the configuration; configured machines: {machine_names}"
        )
    return [machine for machine in settings.machines.values() if not names or machine.name in names]


def _listen(
    settings: Settings,
    names: Sequence[str],
    ssh_config: Path | None,
    failures: set[str],
    lines: int = 0,
    follow: bool = False,
    looks_for: str = "",
) -> Iterator[tuple[str, list[str]]]:
    """Yield what each role's script prints, with its machine and role, until all have ended.

    If a log can't be read, the reason is printed at once and added to `failures`.
    """
    roles = [
        (machine, unit)
        for machine in select_machines(settings, names)
        for unit in (*service_units(machine, settings), *units_of(machine))
    ]
    if not roles:
        raise UsageError("no machine in the configuration has a role: add a table [machines.NAME] with roles")
    log_queue: queue.Queue[LogMessage] = queue.Queue()
    remotes: list[Remote] = []

    def listen(machine: MachineSettings, unit: Unit) -> None:
        name = f"{machine.name} {unit.name.removeprefix('kvasir-')}"
        try:
            remotes.append(remote := Remote(machine, ssh_config))
            log_lines = remote.lines(_script(machine, unit, lines, follow, looks_for))
            for chunk in ([line] for line in log_lines) if follow else [list(log_lines)]:
                log_queue.put((name, chunk))
            log_queue.put((name, None))
        except DeployFailed as error:
            log_queue.put((name, error))

    for role in roles:
        threading.Thread(target=listen, args=role, daemon=True).start()
    open_logs = len(roles)
    try:
        while open_logs:
            name, message = log_queue.get()
            if isinstance(message, list):
                yield name, message
                continue
            open_logs -= 1
            # if a machine can't be reached, all its roles give the same reason, so it is printed only once
            if message and str(message) not in failures:
                click.echo(f"kvasir: {message}", err=True)
                failures.add(str(message))
    finally:
        for remote in remotes:
            remote.hang_up()


def _script(machine: MachineSettings, unit: Unit, lines: int, follow: bool, looks_for: str) -> str:
    if supervisor_of(machine) == "systemd":
        # Only root sees the full log of a service. Without sudo rights, the log shows only the worker's own lines.
        check = "j=journalctl; if sudo -n -l journalctl >/dev/null 2>&1; then j='sudo -n journalctl'; fi"
        show = f"$j --quiet --no-pager --output cat --lines {'all' if looks_for else lines} --unit {unit.name}"
        show += " --follow" if follow else ""
    else:
        path = shlex.quote(f"{machine.folder}/log/{unit.name}.log")
        path = path if machine.folder.startswith("/") else f'"$HOME"/{path}'
        check = f"[ -e {path} ] || {{ echo '{unit.name} has written no log yet' >&2; exit 1; }}"
        show = f"tail -n {'+1' if looks_for else lines} {'-F ' if follow else ''}{path} 2>/dev/null"
    if not follow:
        return f"{check}; {show}{looks_for}"
    # Without a terminal, the remote log command doesn't notice that this process has ended. So the script kills the
    # log command when the script's own input ends.
    return (
        f"{check}; exec 3<&0; {{ exec {show}; }} & said=$!; {{ read -r _ <&3; kill $said; }} & ear=$!; "
        "wait $said; code=$?; kill $ear; exit $code"
    )

"""`engines`, `doctor`: show what could run here, and check whether what runs fits together."""

import json
import os
import shlex
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from engines.entry import EngineEntry
from engines.registry import entries, partners
from engines.vllm import environment
from infra.config.settings import Settings
from kvasir.connect import connect, is_cluster
from kvasir.doctor.cluster import examine
from kvasir.doctor.findings import Finding
from kvasir.doctor.steps import STEPS
from kvasir.doctor.trial import Trial, TrialResult, served_models, try_model
from kvasir.options import Globals, Number, json_option
from kvasir.terminal import print_table, say, stdout
from kvstore.redis.forget import forget_named
from messages.errors import ConfigError, StoreUnavailable, UsageError
from producers.words import plural

EVERY_MODEL = "*"
_LOCAL_REGISTRATIONS_S = 10.0  # Kvasir waits at most this many seconds for the workers in this process to register
_TRIAL_COLUMNS = (
    *("", "model", "prefill", "decode", "KV transfer"),
    *("evaluated", "prefill tokens/s", "put ≥ MB/s", "get MB/s", "decode tokens/s", "seconds"),
)
_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red"}


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def engines(context: click.Context, as_json: bool) -> int:
    """Show what each engine can do, where it can send KV caches, and whether it runs on this machine."""
    if context.invoked_subcommand:
        return 0
    if as_json:
        click.echo(json.dumps([_entry_json(entry) for entry in entries().values()]))
        return 0
    print_table(
        ("engine", "here", "prefill", "decode", "hands KV over to", "while computing", "weights"),
        map(_row, entries().values()),
    )
    for entry in entries().values():
        if entry.note:
            say(f"{entry.name}: {entry.note}")
    say("KV transfer needs the same weights at both ends; each worker proves it at its start and says so.")
    return 0


@engines.command()
@click.argument("engine", type=click.Choice(["vllm"]))
def install(engine: str) -> int:
    """Make the separate environment that an engine needs. Other engines are extras: pip install kvasir-inference[mlx].

    vLLM's takes about 1 GB to download and 3.5 GB on disk, with CUDA more. It lies in the user's folder for data;
    delete it there to remove it. If KVASIR_VLLM_PYTHON is set, that environment is checked and nothing is installed.
    """
    try:
        vllm = environment.find()
    except ConfigError:  # vLLM's environment is missing or incomplete
        if os.environ.get(environment.VARIABLE):
            raise
        cuda = shutil.which("nvidia-smi") is not None
        say(f"Making vLLM's environment ({'several GB' if cuda else environment.SIZE}) in {environment.folder()}")
        vllm = environment.install(cuda, say)
    say(f"vLLM {vllm.release} is in {vllm.python}")
    if vllm.release != environment.TESTED_RELEASE:
        say(f"It was not tested with this release of Kvasir; {environment.TESTED_RELEASE} was.")
    return 0


@engines.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def connector(folder: Path) -> int:
    """Write vLLM's KV connector to FOLDER, for a `vllm serve` that you start yourself, in a container for example.

    It needs only what vLLM brings: neither Kvasir nor RabbitMQ nor Redis. The worker runs on the same machine, and both
    meet in /dev/shm. FOLDER/vllm.yaml holds the flags. A file that you have changed stays as it is.
    """
    target = folder.expanduser().resolve()
    is_new = environment.write_connector(target)
    folder_text, flags = shlex.quote(str(target)), shlex.quote(str(target / environment.FLAGS))
    if not is_new:
        say(f"{flags} differs from this release's and was left as it is. Delete it to have it written again.")
    say(
        f"The connector is in {folder_text}. It was tested with vLLM {environment.TESTED_RELEASE}. "
        "Start vLLM with it:\n"
        f"  PYTHONPATH={folder_text} vllm serve MODEL --host 127.0.0.1 --port 8000 --config {flags}\n"
        "or in a container:\n"
        "  docker run --gpus all --ipc=host -p 127.0.0.1:8000:8000 "
        f"-v {folder_text}:/kvasir:ro -e PYTHONPATH=/kvasir \\\n"
        "    -v MODEL:/model:ro IMAGE vllm serve /model --config /kvasir/vllm.yaml\n"
        "and then a worker, on the same machine:\n"
        "  kvasir prefill-worker --model NAME --engine vllm --weights 'http://127.0.0.1:8000?model=MODEL'"
    )
    return 0


def _row(entry: EngineEntry) -> list[str]:
    can = entry.capabilities
    return [
        entry.name,
        entry.install_command() or "yes",
        "yes" if can.prefill else "passes through",
        "yes" if can.decode else "no",
        ", ".join(partners(entry.name)) or "nothing",
        "yes" if can.blocks_while_computing else "no",
        entry.weights,
    ]


def _entry_json(entry: EngineEntry) -> dict[str, Any]:
    return {
        "engine": entry.name,
        "installed": not entry.install_command(),
        "install": entry.install_command(),
        "capabilities": asdict(entry.capabilities),
        "transfers_kv_to": partners(entry.name),
        "weights": entry.weights,
        "note": entry.note,
    }


@click.command()
@click.option(
    "--try",
    "model",
    is_flag=False,
    flag_value=EVERY_MODEL,
    metavar="[MODEL]",
    help="Test each pair of live workers of this model with a job of 2,000 tokens [default: all served models].",
)
@click.option(
    "--wait",
    "wait_s",
    type=Number(1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="With --try, wait up to this many seconds for the answers.",
)
@json_option
@click.pass_obj
def doctor(global_options: Globals, model: str | None, wait_s: float, as_json: bool) -> int:
    """Check configuration, broker, store and workers, and say what to do. Exit code 1 if there is an error.

    With --try: whether each pair of workers transfers KV, how fast, and what that took of the network. Exit code 1 if a
    KV transfer that should work did not.
    """
    if model is not None:
        return _try(global_options.settings(), model, wait_s, as_json)
    findings = list(examine(global_options.settings))
    levels = Counter(finding.level for finding in findings)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        print_findings(findings)
        say(f"{plural(levels['error'], 'error')}, {plural(levels['warn'], 'warning')}")
    return 1 if levels["error"] else 0


def _try(settings: Settings, model: str, wait_s: float, as_json: bool) -> int:
    cluster = is_cluster(settings)
    if model == EVERY_MODEL and not cluster:
        raise UsageError(
            "no broker is configured, so nothing is running: name a model to load and try here (--try MODEL)"
        )
    names = list(settings.models) if model == EVERY_MODEL else [settings.model(model).name]
    with connect(settings, names, name="doctor") as client:
        if model == EVERY_MODEL:
            names = served_models(client) or names
        results = [try_model(client, name, wait_s, 0.0 if cluster else _LOCAL_REGISTRATIONS_S) for name in names]
    _print_trials(results, as_json)
    if cluster:
        with suppress(StoreUnavailable):  # if the store is unavailable, these jobs' results expire after the TTL
            forget_named(settings.store_url_with_secret(), [job for result in results for job in result.job_ids])
    return 1 if any(result.has_failed for result in results) else 0


def _print_trials(results: list[TrialResult], as_json: bool) -> None:
    trials = [trial for result in results for trial in result.trials]
    findings = [finding for result in results for finding in result.findings]
    if as_json:
        click.echo(json.dumps({"trials": [asdict(t) for t in trials], "findings": [asdict(f) for f in findings]}))
        return
    if trials:
        print_table(_TRIAL_COLUMNS, [_trial_row(trial) for trial in trials], right=_TRIAL_COLUMNS[5:])
    for trial in trials:
        if trial.found:
            say(f"{trial.level}: {trial.prefill or '?'} to {trial.decode or '?'}: {trial.found} -> {trial.todo}")
    if findings:
        print_findings(findings)


def _trial_row(trial: Trial) -> list[str]:
    return [
        trial.level,
        trial.model,
        f"{trial.prefill or '?'} ({trial.prefill_device or '?'})",
        f"{trial.decode or '?'} ({trial.decode_device or '?'})",
        trial.kv_transfer,
        f"{trial.evaluated_tokens:,} of {trial.prompt_tokens:,}",
        _figure(trial.prefill_tokens_per_s),
        _figure(trial.put_bytes_per_s / 1e6),
        _figure(trial.get_bytes_per_s / 1e6),
        _figure(trial.decode_tokens_per_s),
        f"{trial.total_s:.1f}",
    ]


def _figure(value: float) -> str:
    """Format a number with at least three digits, or a dash if it was not measured."""
    if not value:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_findings(findings: list[Finding]) -> None:
    """Print what is well as a table on stdout, and below it each problem with what to do, the worst last.

    Services that were tried step by step have their times above, in milliseconds.
    """
    service_findings = [finding for finding in findings if finding.steps or finding.stopped_at]
    if service_findings:
        print_table(("ms", *STEPS), [_steps_row(finding) for finding in service_findings], STEPS)
    well = [finding for finding in findings if finding.level == "ok"]
    print_table(("", "about", "found"), [(_level(finding), finding.subject, finding.what) for finding in well])
    for finding in sorted(findings, key=lambda finding: finding.level == "error"):
        if finding.level != "ok":
            stdout.print(_level(finding), Text(finding.subject))
            say(f"  {finding.what}")
            say(f"  What to do: {finding.todo}")


def _level(finding: Finding) -> Text:
    return Text(finding.level, _STYLES[finding.level])


def _steps_row(finding: Finding) -> list[str]:
    """Return a time for each completed step, "no" where it stopped, and a dash for steps that were not tried."""
    milliseconds = {name: f"{1000 * seconds:,.0f}" for name, seconds in finding.steps.items()}
    return [finding.subject, *(milliseconds.get(name, "no" if name == finding.stopped_at else "–") for name in STEPS)]

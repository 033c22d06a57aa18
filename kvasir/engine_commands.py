"""`engines`, `doctor`: what could run here, and whether what runs fits together."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from engines.catalogue import CATALOGUE, Entry
from kvasir.doctor import examine
from kvasir.findings import Finding
from kvasir.options import Globals
from kvasir.terminal import say, stdout, table

_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def engines(as_json: bool) -> int:
    """Show what each engine can do and hand over, and which of them run on this machine."""
    if as_json:
        click.echo(json.dumps([_described(entry) for entry in CATALOGUE]))
        return 0
    table(
        ("engine", "here", "prefill", "decode", "hands KV over to", "while computing", "weights"), map(_row, CATALOGUE)
    )
    for entry in CATALOGUE:
        if entry.note:
            say(f"{entry.name}: {entry.note}")
    say("Hand-over needs the same weights at both ends; each worker proves it when it starts, and its card says so.")
    return 0


def _row(entry: Entry) -> list[str]:
    can = entry.capabilities
    return [
        entry.name,
        entry.missing or "yes",
        "yes" if can.prefill else "passes through",
        "yes" if can.decode else "no",
        ", ".join(entry.partners()) or "nothing",
        "yes" if can.blocks_while_computing else "no",
        entry.weights,
    ]


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "engine": entry.name,
        "installed": not entry.missing,
        "install": entry.missing,
        "capabilities": asdict(entry.capabilities),
        "hands_over_to": entry.partners(),
        "weights": entry.weights,
        "note": entry.note,
    }


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.pass_obj
def doctor(given: Globals, as_json: bool) -> int:
    """Check configuration, broker, store and workers, and say what to do. Exit code 1 if there is an error."""
    findings = list(examine(given.settings))
    levels = Counter(finding.level for finding in findings)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(findings)
        say(f"{levels['error']} errors, {levels['warn']} warnings")
    return 1 if levels["error"] else 0


def _print(findings: list[Finding]) -> None:
    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("", "about", "found", "what to do"):
        made.add_column(column, overflow="fold")
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        made.add_row(level, Text(finding.subject), Text(finding.what), Text(finding.todo))
    stdout.print(made)


COMMANDS = (engines, doctor)

"""Known vulnerabilities of what .venv holds: runs pip-audit, and judges its report. `make audit` calls it.

By itself pip-audit ends well when it could look nothing up: here a package that was not audited is a failure too.
Advisories come overnight, so this is no part of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import click

OURS = "kvasir-inference"
LONGEST = timedelta(days=92)  # of an exception; then somebody looks again


@dataclass(frozen=True, slots=True)
class Aside:
    """Why an advisory does not reach us, and until when that holds."""

    why: str
    until: date


# Advisories left aside, by their id. One that is no longer reported has to go.
EXCEPTIONS: dict[str, Aside] = {}


def main(pip_audit: str) -> int:
    """0 if every package was looked up and nothing is known against any of them, exceptions aside."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [pip_audit, "--progress-spinner", "off", "--format", "json", "--output", str(report)]
        done = subprocess.run([*command, "--path", sysconfig.get_path("purelib")], capture_output=True, text=True)
        if not report.is_file():
            said = done.stderr.strip().splitlines()
            click.echo(f"audit: the advisories can't be looked up: {said[-1] if said else 'pip-audit did not say why'}")
            return 1
        problems = list(judged(json.loads(report.read_text("utf-8")), EXCEPTIONS))
    problems += flaws(EXCEPTIONS, datetime.now(UTC).date())
    for known, aside in EXCEPTIONS.items():
        click.echo(f"audit: {known} is known and left aside until {aside.until}: {aside.why}")
    for problem in problems:
        click.echo(f"audit: {problem}")
    click.echo("audit: clean" if not problems else "audit: failed")
    return int(bool(problems))


def flaws(exceptions: Mapping[str, Aside], today: date) -> Iterator[str]:
    """What is wrong with the list of exceptions itself, in sentences."""
    for known, aside in exceptions.items():
        if len(aside.why.split()) < 4:
            yield f"the exception {known} doesn't say why it does not reach us"
        if aside.until < today:
            yield f"the exception {known} ended on {aside.until}: look at it again"
        if aside.until > today + LONGEST:
            yield f"the exception {known} lasts until {aside.until}: set a date within {LONGEST.days} days"


def judged(report: Mapping[str, Any], exceptions: Mapping[str, Aside]) -> Iterator[str]:
    """What is wrong, in sentences, by pip-audit's JSON."""
    packages = [package for package in report["dependencies"] if package["name"] != OURS]
    skipped = [package for package in packages if "skip_reason" in package]
    if skipped and len(skipped) == len(packages):
        yield f"PyPI could not be asked about any of {len(packages)} packages: {skipped[0]['skip_reason']}"
    elif skipped or not packages:
        reason = f"; the first: {skipped[0]['skip_reason']}" if skipped else ""
        yield f"{len(skipped)} of {len(packages)} packages could not be looked up{reason}"
    reported = set()
    for package in packages:
        for found in package.get("vulns", ()):
            ids = {found["id"], *found.get("aliases", ())}
            reported |= ids
            if ids.isdisjoint(exceptions):
                mended = ", ".join(found.get("fix_versions", ())) or "no version yet"
                yield f"{package['name']} {package['version']}: {found['id']}; mended in {mended}"
    for gone in sorted(exceptions.keys() - reported) if not skipped else ():
        yield f"the exception {gone} is not reported any more: take it out of {Path(__file__).name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Known vulnerabilities of what .venv holds: runs pip-audit, and judges its report. `make audit` calls it.

By itself pip-audit ends well when it could look nothing up: here a package that was not audited is a failure too.
Advisories come overnight, so this is no part of the tests.
"""

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

OWN_PACKAGE = "kvasir-inference"
LONGEST = timedelta(days=92)  # of an exception; then somebody looks again


@dataclass(frozen=True, slots=True)
class AdvisoryException:
    """Why an advisory does not reach us, and until when that holds."""

    reason: str
    until: date


# Advisories left aside, by their id. One that is no longer reported has to go.
EXCEPTIONS: dict[str, AdvisoryException] = {}


def main(pip_audit: str) -> int:
    """0 if every package was looked up and nothing is known against any of them, exceptions aside."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [pip_audit, "--progress-spinner", "off", "--format", "json", "--output", str(report)]
        completed_process = subprocess.run(
            [*command, "--path", sysconfig.get_path("purelib")], capture_output=True, text=True
        )
        if not report.is_file():
            error_lines = completed_process.stderr.strip().splitlines()
            reason = error_lines[-1] if error_lines else "pip-audit did not say why"
            click.echo(f"audit: the advisories can't be looked up: {reason}")
            return 1
        problems = list(problems_of(json.loads(report.read_text("utf-8")), EXCEPTIONS))
    problems += flaws(EXCEPTIONS, datetime.now(UTC).date())
    for advisory_id, exception in EXCEPTIONS.items():
        click.echo(f"audit: {advisory_id} is known and left aside until {exception.until}: {exception.reason}")
    for problem in problems:
        click.echo(f"audit: {problem}")
    click.echo("audit: clean" if not problems else "audit: failed")
    return int(bool(problems))


def flaws(exceptions: Mapping[str, AdvisoryException], today: date) -> Iterator[str]:
    """What is wrong with the list of exceptions itself, in sentences."""
    for advisory_id, exception in exceptions.items():
        if len(exception.reason.split()) < 4:
            yield f"the exception {advisory_id} doesn't say why it does not reach us"
        if exception.until < today:
            yield f"the exception {advisory_id} ended on {exception.until}: look at it again"
        if exception.until > today + LONGEST:
            yield f"the exception {advisory_id} lasts until {exception.until}: set a date within {LONGEST.days} days"


def problems_of(report: Mapping[str, Any], exceptions: Mapping[str, AdvisoryException]) -> Iterator[str]:
    """What is wrong, in sentences, by pip-audit's JSON."""
    packages = [package for package in report["dependencies"] if package["name"] != OWN_PACKAGE]
    skipped_packages = [package for package in packages if "skip_reason" in package]
    if skipped_packages and len(skipped_packages) == len(packages):
        yield f"PyPI could not be asked about any of {len(packages)} packages: {skipped_packages[0]['skip_reason']}"
    elif skipped_packages or not packages:
        reason = f"; the first: {skipped_packages[0]['skip_reason']}" if skipped_packages else ""
        yield f"{len(skipped_packages)} of {len(packages)} packages could not be looked up{reason}"
    reported_ids = set()
    for package in packages:
        for vulnerability in package.get("vulns", ()):
            ids = {vulnerability["id"], *vulnerability.get("aliases", ())}
            reported_ids |= ids
            if ids.isdisjoint(exceptions):
                fixed_versions = ", ".join(vulnerability.get("fix_versions", ())) or "no version yet"
                yield f"{package['name']} {package['version']}: {vulnerability['id']}; fixed in {fixed_versions}"
    for advisory_id in sorted(exceptions.keys() - reported_ids) if not skipped_packages else ():
        yield f"the exception {advisory_id} is not reported any more: take it out of {Path(__file__).name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

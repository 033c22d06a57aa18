"""The findings of a dry run, as printed by `kvasir grade --dry-run --json`."""

from pathlib import Path
from typing import Any

from desk.assignments import dry_run_work
from producers.storage.private import read_ordinary
from producers.storage.shapes import from_json


def read_findings(folder: Path) -> dict[str, Any]:
    """Return the findings of the last dry run; empty if there was none, or while it is running."""
    work = dry_run_work(folder)
    try:
        findings: dict[str, Any] = from_json(read_ordinary(work.out))
        # If the findings have an unexpected form, building the table fails here, and not later on a page.
        findings_table(findings)
        sum(part["tokens"] for part in findings["shared_prefix"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return findings


def findings_table(findings: dict[str, Any]) -> list[dict[str, object]]:
    """Return a row for each submission."""
    return [
        {
            "submission": item.get("person") or item["submission"],
            "language": item["language"],
            **{f"{kind} tokens": item["tokens"].get(kind, 0) for kind in ("code", "text", "output")},
            "prompt tokens": sum(item["prompts"].values()),
            "needs review": "; ".join(item.get("review_reasons", ())),
            "remarks": "; ".join(item.get("remarks", ())),
        }
        for item in findings["submissions"]
    ]

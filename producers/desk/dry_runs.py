"""What a dry run found, as `kvasir grade --dry-run --json` printed it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from producers.desk.assignments import dry_run


def found_by(folder: Path) -> dict[str, Any]:
    """The last dry run's findings; empty if there was none, or while it is running."""
    work = dry_run(folder)
    try:
        found = json.loads(work.out.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def repeated_tokens(found: dict[str, Any]) -> int:
    """Prompt tokens that need not be computed because the class shares them."""
    graded = sum(1 for item in found["submissions"] if item["prompts"])
    return sum(part["tokens"] * max(0, graded - 1) for part in found["shared_prefix"])


def table(found: dict[str, Any]) -> list[dict[str, object]]:
    """A row for each submission."""
    return [_row(item) for item in found["submissions"]]


def _row(item: dict[str, Any]) -> dict[str, object]:
    remarks = [item["problem"]] if item["problem"] else [*item["cuts"], *item["notes"]]
    if item["empty"]:
        remarks.insert(0, "nothing of the student's own: 0 points without a model")
    if item["images_left_out"]:
        remarks.append(f"images left out: {item['images_left_out']}")
    return {
        "submission": item["submission"],
        "language": item["language"],
        **{f"{kind} tokens": item["tokens"].get(kind, 0) for kind in ("code", "text", "output")},
        "prompt tokens": sum(item["prompts"].values()),
        "remarks": "; ".join(remarks),
    }

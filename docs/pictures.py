"""Where the pictures in the docs come from: docs/screenshots/manifest.json, written with each, read by a test."""

import hashlib
import json
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/screenshots"
MANIFEST = FOLDER / "manifest.json"
# What the picture of a review shows as feedback, by criterion: written by a person who read that submission.
FEEDBACK = {
    "n_doubled": "You found the doubled order lines, and 37 is right.",
    "n_incomplete": "You report n_incomplete_rows; the assignment asks for n_incomplete. The number, 58, is right.",
    "share_churned": "You report 30. Customers without any order are missing from your count: half of the points.",
    "mean_amount": "83 is close. Drop the rows without an amount before you take the mean.",
    "max_month": "61 is not the best month: sum the amounts by month once more.",
}
SUMMARY = "The doubled rows are found rightly. Look again at names, and at what is left out before a mean is taken."


def note(picture: Path, command: str, model: str, feedback: tuple[str, ...] = ()) -> None:
    """Write down what a picture shows. `feedback`: what stands in it as feedback to a student, edited by a person."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    kept = json.loads(MANIFEST.read_text("utf-8")) if MANIFEST.exists() else {}
    kept[picture.name] = {
        "version": version,
        "command": command,
        "model": model,
        "commit": commit.strip(),
        "sha256": hashlib.sha256(picture.read_bytes()).hexdigest(),
        "feedback": list(feedback),
    }
    MANIFEST.write_text(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n", "utf-8")

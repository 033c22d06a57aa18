"""`make demo`: grades the example homework on this machine and says whether it went as it should.

Ends 0 only if exactly the submissions named in examples/homework/expected.json failed, each for the reason given
there, and every other one has a grade (the empty one: 0 points, with the reason).
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from kvasir import cli

HERE = Path(__file__).resolve().parent
HOMEWORK = HERE / "homework"
RESULTS = HOMEWORK / "results"


def main() -> int:
    """Grade, then check; 0 if all is as expected."""
    options = argparse.ArgumentParser(description="Grade the example homework with the demo model.")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the batch")
    out = options.parse_args().out
    print("Grading examples/homework with a tiny model: prefill, KV hand-over and decode, all in this process.")
    print("It is the command that a course team types for its own class:\n")
    command = _command(out)
    print("  kvasir " + " ".join(_shown(word) for word in command) + "\n", flush=True)
    code = cli.run(command)
    problems = check(out) if code in (0, cli.FAILED) else [f"kvasir grade ended with {code}"]
    for problem in problems:
        print(f"demo: {problem}", file=sys.stderr)
    if not problems:
        print("\nAs expected: every submission has its grade or its reason. (kvasir grade itself returned 1, because")
        print("one submission is broken on purpose.) These are not real grades: the model knows this kind of toy")
        print("assignment and nothing else.")
    return 1 if problems else 0


def check(out: Path) -> list[str]:
    """What differs from expected.json, a sentence each."""
    expected = json.loads((HOMEWORK / "expected.json").read_text("utf-8"))
    found = {row["submission"]: row for row in _graded(out)}
    files = {path.name for path in (HOMEWORK / "submissions").iterdir()}
    problems = [f"{name} is missing from the results" for name in sorted(files - found.keys())]
    for name, row in found.items():
        problem = _problem(name, row, expected)
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _problem(name: str, row: dict[str, Any], expected: dict[str, Any]) -> str:
    reason = expected["failed"].get(name)
    if reason is not None:
        right = row["state"] == "failed" and row["points"] is None and reason in row["reason"]
        return "" if right else f"should have failed because of {reason!r}, but is {row['state']}: {row['reason']}"
    if name in expected["empty"]:
        right = row["state"] == "empty" and row["points"] == 0 and row["reason"]
        return "" if right else f"should be empty with 0 points and a reason, but is {row['state']}"
    return "" if row["state"] == "graded" else f"should be graded, but is {row['state']}: {row['reason']}"


def _graded(out: Path) -> list[dict[str, Any]]:
    """The outcome as `kvasir results --json` gives it."""
    text = StringIO()
    with redirect_stdout(text):
        cli.run(["--config", str(HERE / "demo.toml"), "results", str(out), "--json"])
    submissions: list[dict[str, Any]] = json.loads(text.getvalue())["submissions"]
    return submissions


def _command(out: Path) -> list[str]:
    files = {"rubric": "rubric.yaml", "solution": "solution.ipynb", "template": "template.ipynb"}
    inputs = [word for option, name in files.items() for word in (f"--{option}", str(HOMEWORK / name))]
    submissions = str(HOMEWORK / "submissions")
    return ["--config", str(HERE / "demo.toml"), "grade", submissions, *inputs, "--out", str(out)]


def _shown(word: str) -> str:
    path = Path(word)
    return str(path.relative_to(HERE.parent)) if path.is_absolute() and path.is_relative_to(HERE.parent) else word


if __name__ == "__main__":
    sys.exit(main())

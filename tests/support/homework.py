"""Classes to grade: the example one, and tiny ones made on the spot; and what is compared between two gradings."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from grading.prompts.prompt import build_prompt
from grading.rubric.rubric import Aspect, load_rubric
from grading.submissions.reading import read_document, read_submissions
from messages.jobs import prompt_text
from tests.support.processes import ROOT, CompletedCommand, environment

EXAMPLE = ROOT / "examples/homework"

RUBRIC = """\
title: Means
criteria:
  - {id: works, title: It runs, points: 3, model: code, guidance: One point for each function that works.}
  - {id: clear, title: It can be read, points: 2, model: feedback, guidance: Names and remarks count.}
"""

DEMO_PATIENCE_S = 400.0


class Demo:
    """The demo, run once into a folder of its own."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.first = self.run()

    def run(self) -> CompletedCommand:
        """Once more, into the same folder."""
        completed_process = subprocess.run(
            [sys.executable, "-m", "examples.demo", "--out", str(self.out)],
            env=environment(self.out.parent),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=DEMO_PATIENCE_S,
        )
        return CompletedCommand(completed_process.returncode, completed_process.stdout, completed_process.stderr)


def example(out: Path, *extra_arguments: str) -> list[str]:
    """`grade` or `submit` without its name: the example class, into `out`."""
    files = {
        "rubric": "rubric.yaml",
        "solution": "solution.ipynb",
        "template": "template.ipynb",
        "roster": "gradebook.csv",
    }
    inputs = [word for option, name in files.items() for word in (f"--{option}", str(EXAMPLE / name))]
    return [str(EXAMPLE / "submissions"), *inputs, "--out", str(out), *extra_arguments]


def example_prompt(role: Aspect, student: str) -> str:
    """A prompt of the example class, of the submission whose name begins so; always the same."""
    solution, template = (read_document(EXAMPLE / name) for name in ("solution.ipynb", "template.ipynb"))
    submission = next(
        submission for submission in read_submissions(EXAMPLE / "submissions") if submission.name.startswith(student)
    )
    prompt = build_prompt(role, load_rubric(EXAMPLE / "rubric.yaml"), solution, template, submission, "0123456789ab")
    return prompt_text(prompt)


def tiny_class(folder: Path, size: int = 3) -> Path:
    """A rubric and `size` short submissions; two jobs each."""
    handed_in = folder / "submissions"
    handed_in.mkdir(parents=True)
    (folder / "rubric.yaml").write_text(RUBRIC, "utf-8")
    for number in range(size):
        text = f"# Student {number}\ndef mean(values):\n    return sum(values) / (len(values) + {number})\n"
        (handed_in / f"student{number}_{100 + number}_1_homework.py").write_text(text, "utf-8")
    return folder


def tiny(folder: Path, out: Path, *extra_arguments: str) -> list[str]:
    """`grade` or `submit` without its name: a class made by `tiny_class`, into `out`."""
    return [str(folder / "submissions"), "--rubric", str(folder / "rubric.yaml"), "--out", str(out), *extra_arguments]


def same_batch(original: Path, copy: Path) -> Path:
    """A folder for the same batch from the start: its id and secret, and so the same job ids; no result."""
    copy.mkdir(parents=True)
    shutil.copy(original / "batch.json", copy)
    return copy


def journal(out: Path) -> list[dict[str, Any]]:
    """The results in a batch's folder, line by line; a last line that is being written is left out."""
    path = out / "results.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def outcomes(out: Path) -> set[tuple[str, str, str]]:
    """(job, state, hash of the text) of every result."""
    return {(row["job_id"], row["state"], hashlib.sha256(row["text"].encode()).hexdigest()) for row in journal(out)}


def assert_each_once(out: Path) -> None:
    """Every job of the batch has one line in the journal, and no line is there twice."""
    planned_ids = [job["job_id"] for job in json.loads((out / "batch.json").read_text("utf-8"))["jobs"]]
    assert sorted(row["job_id"] for row in journal(out)) == sorted(planned_ids)

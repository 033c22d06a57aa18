"""docs/one_job.md is true: every function it names exists, and one real job calls them in its order."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.one_job import ROOT, steps


def test_one_real_job_calls_the_functions_of_the_page_in_its_order(tmp_path):
    (tmp_path / "rubric.yaml").write_text(
        "title: T\ncriteria:\n  - {id: a, title: A, points: 2, guidance: g, model: code}\n"
    )
    (tmp_path / "ada.R").write_text("x <- mean(orders$amount)\n" * 5)
    command = [sys.executable, "-m", "tests.support.one_job", "ada.R", "--rubric", "rubric.yaml"]

    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    (journal,) = tmp_path.glob("results/*/results.jsonl")
    assert [json.loads(line)["state"] for line in journal.read_text("utf-8").splitlines()] == ["succeeded"]
    assert [tuple(step) for step in json.loads(done.stdout.splitlines()[-1])] == steps()

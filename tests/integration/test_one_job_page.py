"""docs/explanation/one_job.md is true: what it names exists, and one real job calls its functions in its order."""

import json
import os
import subprocess
import sys
from dataclasses import fields

from tests.support.one_job import ROOT, steps, types


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
    called, made = json.loads(done.stdout.splitlines()[-1])
    assert [tuple(step) for step in called] == steps()
    # What so small a model writes may be no answer.
    assert {kind.__name__ for kind in types()} - {*made} <= {"ParsedAnswer"}


def test_no_type_of_the_page_repeats_all_fields_of_another() -> None:
    fields_by_type = {kind: {field.name for field in fields(kind)} for kind in types()}
    assert [
        (repeated.__name__, kind.__name__)
        for kind, kind_fields in fields_by_type.items()
        for repeated, repeated_fields in fields_by_type.items()
        if repeated is not kind and repeated_fields <= kind_fields
    ] == []

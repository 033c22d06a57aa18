"""A disk that fills up in the middle of a batch: one clear sentence, whole files, and the rest later.

The limit is a real one, set by the kernel in a process of its own: what goes beyond it is refused as on a full disk.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from producers.batch.batch import Batch
from tests.support.processes import ROOT, environment

CHILD = """
import resource, sys
from pathlib import Path
from messages.errors import BatchError
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from producers.batch.batch import Batch, BatchEntry

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with Batch(folder) as batch:
        batch.plan([BatchEntry(f"job{n}", f"item{n}", "m", "code", f"student {n}") for n in range(20)], {"folder": "x"})
        for n in range(20):
            job = PrefillJob(f"job{n}", batch.batch_id, f"item{n}", "m", user_prompt("a", "b"), Sampling(1))
            batch.note_confirmed([job])
            result = JobResult(f"job{n}", 1, batch.batch_id, f"item{n}", "m", "succeeded", text="x" * 300)
            batch.journal.record([result])
        print("done", batch.counts().succeeded)
except BatchError as error:
    print("error", error)
"""


def run(folder: Path, limit: int) -> str:
    """What the child says at the end."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), str(limit)]
    done = subprocess.run(command, env=environment(folder), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("limit", "file"), [(500, "batch.json"), (7_000, "results.jsonl")], ids=["manifest", "journal"]
)
def test_a_full_disk_is_one_sentence_and_the_batch_goes_on_once_there_is_room(
    tmp_path: Path, limit: int, file: str
) -> None:
    folder = tmp_path / "hw1"

    said = run(folder, limit)

    assert said.startswith("error can't write ")
    assert file in said
    assert "File too large" in said
    for name in ("results.jsonl", "submitted.jsonl"):
        lines = (folder / name).read_text("utf-8").splitlines(keepends=True) if (folder / name).exists() else []
        assert all(line.endswith("\n") and json.loads(line) for line in lines)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []

    assert run(folder, 0) == "done 20"
    with Batch(folder) as batch:
        assert not batch.open_jobs
        assert len([*batch.journal.job_ids()]) == 20

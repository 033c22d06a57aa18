"""The pictures in the docs are what their manifest says: this file, from this model and version, at a commit."""

import hashlib
import json
import re
import subprocess

import pytest

from docs.pictures import FEEDBACK, FOLDER, MANIFEST, ROOT, SUMMARY

ENTRIES = json.loads(MANIFEST.read_text("utf-8"))
PICTURES = sorted(path.name for path in FOLDER.glob("*.png"))
SHOWN = {
    name
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for name in re.findall(r"!\[[^\]]+\]\((?:docs/|(?:\.\./)*)screenshots/([\w.-]+)\)", page.read_text("utf-8"))
}


def test_every_picture_is_shown_and_has_an_entry() -> None:
    assert PICTURES == sorted(SHOWN) == sorted(ENTRIES)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_was_noted(name: str) -> None:
    entry = ENTRIES[name]
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == entry["sha256"]
    assert entry["model"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", entry["version"])
    assert (ROOT / entry["command"].removeprefix("python -m ").replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_of_a_commit_of_this_project(name: str) -> None:
    commit = ENTRIES[name]["commit"]
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    shallow = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if shallow.stdout.strip() == "false":  # an unpacked archive, and a shallow clone, know no history
        known = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
        assert known.returncode == 0


def test_feedback_in_a_picture_was_written_by_a_person() -> None:
    assert ENTRIES["review.png"]["feedback"] == [*FEEDBACK.values(), SUMMARY]

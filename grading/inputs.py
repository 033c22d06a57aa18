"""Rubric, solution and template: read from the files that were named, and kept in the batch's folder as they were.

A batch grades by what it was planned with. Its copies lie in `inputs/`, under their digests; `batch.json` says which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from grading.request import GradeRequest
from grading.rubric.rubric import Rubric, load_rubric
from grading.submissions.reading import Submission, read_document
from messages.errors import RubricError, SubmissionError
from producers.storage.private import make_folder, open_ordinary, write_atomically

FOLDER = "inputs"
_READERS: dict[str, Callable[[Path], Any]] = {
    "rubric": load_rubric,
    "solution": read_document,
    "template": read_document,
}


@dataclass(slots=True)
class Inputs:
    """What a class is graded by, beside its models."""

    documents: dict[str, Any] = field(default_factory=dict)  # by kind, those that there are
    data: dict[str, bytes] = field(default_factory=dict)  # their files, as they are
    changed_files: list[Path] = field(default_factory=list)  # those named that say something else now

    @property
    def rubric(self) -> Rubric:
        """The rubric."""
        return cast(Rubric, self.documents["rubric"])

    @property
    def solution(self) -> Submission | None:
        """The solution, if there is one."""
        return self.documents.get("solution")

    @property
    def template(self) -> Submission | None:
        """The template, if there is one."""
        return self.documents.get("template")


def read_inputs(request: GradeRequest) -> Inputs:
    """The batch's copy of each, unless the file that was named grades alike: it may have another rule on lateness.

    Raises RubricError, SubmissionError.
    """
    inputs = Inputs()
    for kind, read in _READERS.items():
        named_file: Path | None = getattr(request, kind)
        if not named_file:
            continue
        file = request.copies.get(kind, named_file)
        document = read(file)
        if file != named_file and named_file.exists():
            now = None
            with suppress(RubricError, SubmissionError):
                now = read(named_file)
            if now and _what_grades(now) == _what_grades(document):
                file, document = named_file, now
            else:
                inputs.changed_files.append(named_file)
        inputs.documents[kind] = document
        with open_ordinary(file) as opened_file:
            inputs.data[kind] = opened_file.read()
    return inputs


def keep_inputs(folder: Path, request: GradeRequest, data: Mapping[str, bytes]) -> dict[str, str]:
    """Keep these files in the batch's folder, on disk on return; their digests, by kind."""
    digests = {kind: _digest(content) for kind, content in data.items()}
    for kind, digest in digests.items():
        place = _place(folder, digest, getattr(request, kind))
        if _digest_of(place) != digest:
            make_folder(place.parent)
            write_atomically(place, data[kind])
    return digests


def changed_inputs(stored_request: Mapping[str, Any], data: Mapping[str, bytes]) -> list[str]:
    """Kinds of files that are not those that the batch keeps; none if it keeps none."""
    kept_digests = stored_request.get("inputs", {})
    return [kind for kind, content in data.items() if kind in kept_digests and kept_digests[kind] != _digest(content)]


def kept_inputs(folder: Path, stored_request: Mapping[str, Any]) -> dict[str, Path]:
    """The batch's copies, by kind; none of an older batch's, nor one that has been changed or lost."""
    places = {
        kind: (_place(folder, digest, Path(stored_request.get(kind, ""))), digest)
        for kind, digest in stored_request.get("inputs", {}).items()
        if kind in _READERS
    }
    return {kind: place for kind, (place, digest) in places.items() if _digest_of(place) == digest}


def _place(folder: Path, digest: str, named_file: Path) -> Path:
    return folder / FOLDER / digest[:8] / named_file.name


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of(file: Path) -> str:
    try:
        with open_ordinary(file) as opened_file:
            return _digest(opened_file.read())
    except OSError:
        return ""


def _what_grades(document: Rubric | Submission) -> object:
    return document.digest if isinstance(document, Rubric) else document.parts

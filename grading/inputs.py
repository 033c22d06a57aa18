"""Rubric, solution and template: read from the files that were named, and kept in the batch's folder as they were.

A batch grades by what it was planned with. Its copies lie in `inputs/`, under their digests; `batch.json` says which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def read_inputs(request: GradeRequest) -> tuple[dict[str, Any], dict[str, bytes], list[Path]]:
    """What a class is graded by: documents and their files' bytes, by kind, and files that say something else now.

    A batch's own copy is read, unless the file that was named grades alike: that may have another rule on lateness.
    Raises RubricError, SubmissionError.
    """
    documents, data, changed_files = {}, {}, []
    for kind, reader in _READERS.items():
        named_file: Path | None = getattr(request, kind)
        if not named_file:
            continue
        file = request.copies.get(kind, named_file)
        documents[kind] = reader(file)
        if file != named_file and named_file.exists():
            with suppress(RubricError, SubmissionError):
                now = reader(named_file)
                if _what_grades(now) == _what_grades(documents[kind]):
                    file, documents[kind] = named_file, now
            changed_files += [named_file] if file != named_file else []
        data[kind] = content(file)
    return documents, data, changed_files


def keep_inputs(folder: Path, request: GradeRequest, data: Mapping[str, bytes]) -> dict[str, str]:
    """Keep these files in the batch's folder, on disk on return; their digests, by kind."""
    digests = {kind: hashlib.sha256(kept).hexdigest() for kind, kept in data.items()}
    for kind, digest in digests.items():
        place = _place(folder, kind, digest, getattr(request, kind))
        make_folder(place.parent)
        write_atomically(place, data[kind])
    return digests


def kept_inputs(folder: Path, stored_request: Mapping[str, Any]) -> dict[str, Path]:
    """The batch's copies, by kind; none of an older batch's, nor one that has been changed or lost."""
    places = {
        kind: _place(folder, kind, digest, Path(stored_request.get(kind, "")))
        for kind, digest in stored_request.get("inputs", {}).items()
    }
    changed_kinds = changed_inputs(stored_request, {kind: content(place) for kind, place in places.items()})
    return {kind: place for kind, place in places.items() if kind not in changed_kinds}


def changed_inputs(stored_request: Mapping[str, Any], data: Mapping[str, bytes]) -> list[str]:
    """Kinds of which the batch keeps something else than these files."""
    digests = stored_request.get("inputs", {})
    return [
        kind for kind, kept in data.items() if kind in digests and digests[kind] != hashlib.sha256(kept).hexdigest()
    ]


def _place(folder: Path, kind: str, digest: str, named_file: Path) -> Path:
    return folder / FOLDER / digest[:8] / (named_file.name if kind in _READERS else f"{kind}.json")


def content(file: Path) -> bytes:
    """What a file holds; nothing of a file that is gone."""
    with suppress(OSError), open_ordinary(file) as opened_file:
        return opened_file.read()
    return b""


def _what_grades(document: Rubric | Submission) -> object:
    return document.digest if isinstance(document, Rubric) else document.parts

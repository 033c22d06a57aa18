"""The pictures in a submission's notebooks. They are read only when somebody looks at the submission.

They are not in any prompt. A student may put any bytes into what is labelled PNG or JPEG.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grading.submissions.archives import MIB, Unreadable, decode_text
from grading.submissions.notebooks import pictures_in, slim_notebook
from grading.submissions.reading import notebooks_of
from messages.errors import SubmissionError

MAX_FIGURES = 40  # maximum for one submission; a plot in a loop makes hundreds of figures
MAX_FIGURE_BYTES = 4 * MIB
_TOKEN = re.compile(r"taken ([0-9]{1,4})")
_PLACE = re.compile(r"(?:file ([0-9]{1,5}) \([^)]*\), )?cell ([0-9]{1,6})(?:, output(?: ([0-9]{1,6}))?)?")

# (file number, cell number, output number). File 0 means that there is only one file. Output 0 means the cell itself.
Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture and its place. `data` is empty if the picture is too large or is not base64."""

    place: Place
    data: bytes


def figures_of(path: Path, name: str) -> list[Figure]:
    """Return the first pictures of the submission that `read_submissions(path)` gives this name.

    The list is empty if the submission can't be read.
    """
    figures: list[Figure] = []
    with suppress(SubmissionError):
        for prefix, data in notebooks_of(path, name):
            with suppress(Unreadable):
                for location, content in _notebook_pictures(data):
                    place = place_of(f"{prefix}{location}")
                    if place and len(figures) < MAX_FIGURES:
                        figures.append(Figure(place, _decode_picture(content)))
    return figures


def place_of(location: str) -> Place | None:
    """Return `SubmissionPart.location` as numbers that can be sorted, or None if it names no cell."""
    match = _PLACE.fullmatch(location)
    if not match:
        return None
    file, cell, output = match.groups()
    return int(file or 0), int(cell), int(output or "output" in location)


@dataclass(slots=True)
class _PictureStash:
    """Keeps base64 away from the JSON parser, which would make another copy of it as text."""

    pieces: list[bytes] = field(default_factory=list)

    def set_aside(self, piece: bytes) -> bytes:
        self.pieces.append(piece if len(self.pieces) < 4 * MAX_FIGURES else b"")
        return b"taken %d" % (len(self.pieces) - 1)

    def restore(self, content: Any) -> bytes:
        """Return the base64 of a picture: the piece that was set aside, or the notebook's lines."""
        match = _TOKEN.fullmatch(content) if isinstance(content, str) else None
        if match:
            number = int(match[1])
            return self.pieces[number] if number < len(self.pieces) else b""
        lines = content if isinstance(content, list) else [content]
        return "".join(line for line in lines if isinstance(line, str)).encode("ascii", "ignore")


def _notebook_pictures(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield each picture's place and base64. Raises Unreadable."""
    stash = _PictureStash()
    for location, content in pictures_in(decode_text(slim_notebook(data, stash.set_aside))[0]):
        yield location, stash.restore(content)


def _decode_picture(text: bytes) -> bytes:
    if len(text) > 2 * MAX_FIGURE_BYTES:
        return b""
    try:
        picture = base64.b64decode(text.replace(rb"\n", b"").replace(rb"\r", b""))
    except (binascii.Error, ValueError):
        return b""
    return picture if len(picture) <= MAX_FIGURE_BYTES else b""

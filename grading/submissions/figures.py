"""The pictures of one submission, as they lie in its notebooks: read only when somebody looks at it.

They go into no prompt. What is called a PNG or a JPEG here are any bytes, of a student's choice.
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

MAX_FIGURES = 40  # in one submission: plotting in a loop gives hundreds
MAX_FIGURE_BYTES = 4 * MIB
_TOKEN = re.compile(r"taken ([0-9]{1,4})")
_PLACE = re.compile(r"(?:file ([0-9]{1,5}) \([^)]*\), )?cell ([0-9]{1,6})(?:, output(?: ([0-9]{1,6}))?)?")

Place = tuple[int, int, int]  # file, cell, output; 0 where there is only one file, or for the cell itself


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, and where it stands. No bytes: it is too large, or no base64."""

    place: Place
    data: bytes


def figures_of(path: Path, name: str) -> list[Figure]:
    """The first pictures of the submission that has this name in `read_submissions(path)`; none if it can't be read."""
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
    """`SubmissionPart.location` as numbers, which sort; None where it names no cell."""
    match = _PLACE.fullmatch(location)
    if not match:
        return None
    file, cell, output = match.groups()
    return int(file or 0), int(cell), int(output or "output" in location)


@dataclass(slots=True)
class _PictureStash:
    """Base64 that is kept out of the way of the JSON parser, which would hold it as text once more."""

    pieces: list[bytes] = field(default_factory=list)

    def set_aside(self, piece: bytes) -> bytes:
        self.pieces.append(piece if len(self.pieces) < 4 * MAX_FIGURES else b"")
        return b"taken %d" % (len(self.pieces) - 1)

    def restore(self, content: Any) -> bytes:
        """The base64 of a picture in a notebook: the piece taken before, or the notebook's lines."""
        match = _TOKEN.fullmatch(content) if isinstance(content, str) else None
        if match:
            number = int(match[1])
            return self.pieces[number] if number < len(self.pieces) else b""
        lines = content if isinstance(content, list) else [content]
        return "".join(line for line in lines if isinstance(line, str)).encode("ascii", "ignore")


def _notebook_pictures(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Where each picture stands, and its base64. Raises Unreadable."""
    stash = _PictureStash()
    slim = slim_notebook(data, stash.set_aside)
    for location, content in pictures_in(decode_text(slim)[0]):
        yield location, stash.restore(content)


def _decode_picture(text: bytes) -> bytes:
    if len(text) > 2 * MAX_FIGURE_BYTES:
        return b""
    try:
        picture = base64.b64decode(text.replace(rb"\n", b"").replace(rb"\r", b""))
    except (binascii.Error, ValueError):
        return b""
    return picture if len(picture) <= MAX_FIGURE_BYTES else b""

"""What an LMS wrote into a submission's name: whose it is, and whether it was late. Names stay with the producer.

Canvas   <name>[_LATE]_<user id>_<attachment id>_<file>, or …_<user id>_text.html; anonymous anon_<anonymous id>_…
Moodle   <full name>_<participant number>_assignsubmission_<plugin>[_]
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath

_CANVAS = re.compile(
    r"(?:anon(?:_LATE)?_(?P<anonymous>[A-Za-z0-9]+)|[^_]+(?:_LATE)?_(?P<number>[0-9]+))"
    r"_(?:(?P<attachment>[0-9]+)(?:_.*)?|(?:text|link)\.html)\Z",
    re.DOTALL,
)
_MOODLE = re.compile(r"(?P<name>.*)_(?P<id>\d+)_assignsubmission_[a-z]+_?(?:/.*)?\Z", re.DOTALL)
_COPY = re.compile(r"(?P<stem>.+?) ?\((?P<number>\d{1,3})\)\Z")  # how browsers call a second download


def canvas_id(name: str) -> str:
    """The user id in a Canvas download's name; "" if it is none. A year or a number of somebody's own makes none."""
    match = _CANVAS.match(PurePosixPath(name).name)
    return (match["anonymous"] or match["number"]) if match and not moodle_id(name) else ""


def canvas_name(name: str) -> str:
    """The part of a Canvas download's name that stands for the student."""
    return PurePosixPath(name).name.split("_")[0]


def canvas_attachment(name: str) -> int:
    """The attachment's id, which grows with time; 0 if there is none."""
    match = _CANVAS.match(PurePosixPath(name).name)
    return int((match["attachment"] or "0")[:18]) if match and not moodle_id(name) else 0


def moodle_id(name: str) -> str:
    """The participant number in the name of a Moodle folder; "" if it is none."""
    match = _MOODLE.match(PurePosixPath(name).name)
    return match["id"] if match else ""


def student_id(name: str) -> str:
    """Canvas's user id or Moodle's participant number; "" if the name holds neither."""
    return canvas_id(name) or moodle_id(name)


def is_late(name: str) -> bool:
    """Whether Canvas marked it as late."""
    return bool(canvas_id(name)) and PurePosixPath(name).name.split("_")[1] == "LATE"


def same_student(name: str) -> str:
    """What two submissions of one student have in common; a name of its own kind where nothing is known."""
    if moodle_id(name):
        return f"moodle {moodle_id(name)}"
    if canvas_id(name):
        return f"canvas {canvas_id(name)}"
    path = PurePosixPath(unicodedata.normalize("NFC", name))  # macOS and zips spell an umlaut in two ways
    match = _COPY.match(path.stem)
    return f"file {path.with_name(match['stem'] + path.suffix) if match else path}"


def age(name: str) -> tuple[int, int, str]:
    """Sorts one student's submissions, the latest last."""
    match = _COPY.match(PurePosixPath(name).stem)
    return canvas_attachment(name), int(match["number"]) if match else 0, name

"""What an LMS wrote into a submission's name: whose it is, and whether it was late. Names stay with the producer.

Canvas   <name>[_LATE]_<user id>_<attachment id>_<file>, anonymous anon_<anonymous id>_…
Moodle   <full name>_<participant number>_assignsubmission_<plugin>[_]
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

_MOODLE = re.compile(r"(?P<name>.*)_(?P<id>\d+)_assignsubmission_[a-z]+_?(?:/.*)?\Z", re.DOTALL)
_COPY = re.compile(r"(?P<stem>.+?) ?\((?P<number>\d{1,3})\)\Z")  # how browsers call a second download


def canvas_id(name: str) -> str:
    """The user id in a Canvas download's name: the first number after the name and LATE; "" if none."""
    if moodle_id(name):
        return ""
    fields = PurePosixPath(name).name.split("_")
    if fields[0] == "anon" and len(fields) > 2:
        return next((part for part in fields[1:] if part != "LATE"), "")
    return next((part for part in fields[1:-1] if part.isascii() and part.isdigit()), "")


def canvas_name(name: str) -> str:
    """The part of a Canvas download's name that stands for the student."""
    return PurePosixPath(name).name.split("_")[0]


def canvas_attachment(name: str) -> int:
    """The attachment's id, which grows with time; 0 if there is none."""
    numbers = [part for part in PurePosixPath(name).name.split("_")[1:] if part.isascii() and part.isdigit()]
    return int(numbers[1][:18]) if len(numbers) > 1 and canvas_id(name) else 0


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
    if canvas_attachment(name) or (canvas_id(name) and name.endswith("_text.html")):
        return f"canvas {canvas_id(name)}"
    path = PurePosixPath(name)
    match = _COPY.match(path.stem)
    return f"file {path.with_name(match['stem'] + path.suffix) if match else path}"


def age(name: str) -> tuple[int, int, str]:
    """Sorts one student's submissions, the latest last."""
    match = _COPY.match(PurePosixPath(name).stem)
    return canvas_attachment(name), int(match["number"]) if match else 0, name

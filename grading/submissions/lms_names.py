"""What an LMS wrote into a submission's name: whose it says that it is, and whether it was late.

It is a claim, which `grading.roster` compares with the people there are. Names stay with the producer.

Canvas   <name>[_LATE]_<user id>_<attachment id>_<file>, or …_<user id>_text.html or …_link.html; anonymous
         [LATE_]anon_<anonymous id>_…: `ContentZipper#get_filename` in instructure/canvas-lms, `lib/content_zipper.rb`
Moodle   <full name>_<participant number>_assignsubmission_<plugin>[_], a folder, or with _<file> a file; a team's
         <group>_<group id>_…, of those without a group <default team>_…: `downloader::get_student_prefix` in
         moodle/moodle, `mod/assign/classes/downloader.php`
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Literal

_CANVAS = re.compile(
    r"(?:(?P<early>LATE_)?anon(?P<late>_LATE)?_(?P<anonymous>[A-Za-z0-9]+)"
    # A name is in small letters; one with underscores of its own is only known by the mark after it.
    r"|(?P<name>[^_]+|[^A-Z]+(?=_LATE_))(?P<is_late>_LATE)?_(?P<number>[0-9]+))"
    r"_(?:(?P<attachment>[0-9]+)(?:_.*)?|(?:text|link)\.html)\Z",
    re.DOTALL,
)
_MOODLE = re.compile(r"(?P<name>.*?)(?:_(?P<number>\d+))?_assignsubmission_[a-z]+(?:_.*)?\Z", re.DOTALL)
_COPY = re.compile(r"(?P<stem>.+?) ?\((?P<number>\d{1,3})\)\Z")  # how browsers call a second download


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a name, as the LMS wrote it."""

    product: Literal["canvas", "moodle"]
    name: str  # name of a person or a group; "" if hidden
    number: str  # Canvas's user id, Moodle's participant number or group id; "" of Moodle's default team
    is_late: bool = False
    attachment: int = 0  # Canvas's id of the file, which grows with time

    @property
    def key(self) -> str:
        """The same for all that one person, or one team, handed in."""
        return f"{self.product} {self.number or self.name}"


@lru_cache(maxsize=1 << 14)
def claim_of(path: str) -> Claim | None:
    """What the name at the end of a path says; None: no LMS made it. A year or a number of somebody's own makes none.

    The name is given in NFC: macOS and zips spell an umlaut in two ways.
    """
    name = unicodedata.normalize("NFC", PurePosixPath(path).name)
    if match := _MOODLE.match(name):
        return Claim("moodle", match["name"], match["number"] or "")
    if match := _CANVAS.match(name):
        is_late = bool(match["early"] or match["late"] or match["is_late"])
        number = match["anonymous"] or match["number"]
        return Claim("canvas", match["name"] or "", number, is_late, int((match["attachment"] or "0")[:18]))
    return None


def moodle_id(name: str) -> str:
    """The participant number, or a group's id, in a name that Moodle made; "" if it is none."""
    claim = claim_of(name)
    return claim.number if claim and claim.product == "moodle" else ""


def student_id(name: str) -> str:
    """Canvas's user id or Moodle's participant number; "" if the name holds neither."""
    claim = claim_of(name)
    return claim.number if claim else ""


def is_late(name: str) -> bool:
    """Whether Canvas marked it as late."""
    claim = claim_of(name)
    return claim is not None and claim.is_late


def same_student(name: str) -> str:
    """What two submissions of one student have in common; a name of its own kind where nothing is known."""
    if claim := claim_of(name):
        return claim.key
    path = PurePosixPath(unicodedata.normalize("NFC", name))
    match = _COPY.match(path.stem)
    return f"file {path.with_name(match['stem'] + path.suffix) if match else path}"


def age(name: str) -> tuple[int, int, str]:
    """Sorts one student's submissions, the latest last."""
    claim, match = claim_of(name), _COPY.match(PurePosixPath(name).stem)
    return claim.attachment if claim else 0, int(match["number"]) if match else 0, name

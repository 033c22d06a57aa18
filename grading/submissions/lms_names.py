"""What an LMS wrote into a submission's name: whose it is, and whether it was late.

This is only a claim, which `grading.roster` compares with the people in the class. Names stay with the producer.

Canvas   <name>[_LATE]_<user id>_<attachment id>_<file>, or …_<user id>_text.html or …_link.html; anonymous
         [LATE_]anon_<anonymous id>_…: `ContentZipper#get_filename` in instructure/canvas-lms, `lib/content_zipper.rb`
Moodle   <full name>_<participant number>_assignsubmission_<plugin>[_] for a folder, or with _<file> for a file; for a
team
         <group>_<group id>_…, for people without a group <default team>_…: `downloader::get_student_prefix` in
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
    # Canvas writes names in lower case. A name that contains underscores is recognised only if _LATE follows it.
    r"|(?P<name>[^_]+|[^A-Z]+(?=_LATE_))(?P<is_late>_LATE)?_(?P<number>[0-9]+))"
    r"_(?:(?P<attachment>[0-9]+)(?:_.*)?|(?:text|link)\.html)\Z",
    re.DOTALL,
)
_MOODLE = re.compile(r"(?P<name>.*?)(?:_(?P<number>\d+))?_assignsubmission_[a-z]+(?:_.*)?\Z", re.DOTALL)
_COPY = re.compile(r"(?P<stem>.+?) ?\((?P<number>\d{1,3})\)\Z")  # browsers call a second download `hw (1).R`


@dataclass(frozen=True, slots=True)
class Claim:
    """What a submission's name claims, as the LMS wrote it."""

    product: Literal["canvas", "moodle"]
    # Name of the person or group; "" if it is hidden.
    name: str
    # Canvas's user id, or Moodle's participant number or group id. "" means Moodle's default team.
    number: str
    is_late: bool = False
    attachment: int = 0  # Canvas's id of the file; a newer file has a higher id

    @property
    def key(self) -> str:
        """A key that is the same for everything that one person or team handed in."""
        return f"{self.product} {self.number or self.name}"


@lru_cache(maxsize=1 << 14)
def claim_of(path: str) -> Claim | None:
    """Return the claim in the last part of a path, or None if no LMS made the name.

    Years and students' own numbers don't count.

    The name is in NFC, because macOS and zips spell umlauts differently.
    """
    name = unicodedata.normalize("NFC", PurePosixPath(path).name)
    if match := _MOODLE.match(name):
        return Claim("moodle", match["name"], match["number"] or "")
    if match := _CANVAS.match(name):
        is_late = bool(match["early"] or match["late"] or match["is_late"])
        number = match["anonymous"] or match["number"]
        return Claim("canvas", match["name"] or "", number, is_late, int((match["attachment"] or "0")[:18]))
    return None


def student_id(name: str) -> str:
    """Return Canvas's user id or Moodle's participant number, or "" if the name holds neither."""
    claim = claim_of(name)
    return claim.number if claim else ""


def is_late(name: str) -> bool:
    """Whether Canvas marked the submission as late."""
    claim = claim_of(name)
    return claim is not None and claim.is_late


def same_student(name: str) -> str:
    """Return a key that all submissions of one student share. Without a claim, copies of one file share a key."""
    if claim := claim_of(name):
        return claim.key
    path = PurePosixPath(unicodedata.normalize("NFC", name))
    match = _COPY.match(path.stem)
    return f"file {path.with_name(match['stem'] + path.suffix) if match else path}"


def age(name: str) -> tuple[int, int, str]:
    """Return a sort key that puts one student's latest submission last."""
    claim, match = claim_of(name), _COPY.match(PurePosixPath(name).stem)
    return claim.attachment if claim else 0, int(match["number"]) if match else 0, name

"""Reads the files of a folder, a zip or a single path as bytes, within limits. Nothing is ever written to disk.

Students' uploads can come from anywhere, so nothing that a file says about itself is believed. Sizes are counted while
reading, links can't lead out of their submission, and a zip's members can't name a place outside the zip.
"""

import io
import itertools
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from messages.errors import SubmissionError

MIB = 1 << 20
MAX_FILE_BYTES = 64 * MIB
# Maximum number of bytes that are read of one student's files.
MAX_SUBMISSION_BYTES = 2 * MAX_FILE_BYTES
# Maximum number of uncompressed bytes that are read of a class's zip. This is 32 times the limit for one student.
MAX_ZIP_BYTES = 4096 * MIB
# Maximum number of files of one student.
MAX_MEMBERS = 2_000
# Maximum number of files in a class's zip.
MAX_ZIP_MEMBERS = 20_000
# Maximum ratio of uncompressed size to compressed size. Notebooks reach about 40.
MAX_RATIO = 200
# Files up to this size may have any compression ratio, because they are harmless, and repetitive output compresses
# well.
RATIO_FREE_BYTES = 8 * MIB

# zipfile reads the whole central directory and makes an object for each member. This limit is enough for 20,000
# members.
_MAX_DIRECTORY_BYTES = 4 * MIB
_CHUNK = 1 << 16
# GitHub Classroom's list of students is called classroom_roster.csv.
_CLUTTER = frozenset({"__macosx", "thumbs.db", "desktop.ini", "classroom_roster.csv"})
# pip, npm, renv, packrat, git and Python fill these folders. They contain no student's work, but often thousands of
# files.
_IGNORED_FOLDERS = frozenset(
    {"venv", ".venv", "site-packages", "node_modules", "renv", ".renv", "packrat", ".git", "__pycache__", ".cache"}
)
_DATA_SUFFIXES = frozenset(
    {".csv", ".tsv", ".json", ".jsonl", ".parquet", ".feather", ".arrow", ".npy", ".npz", ".h5", ".hdf5", ".pkl"}
    | {".rds", ".rda", ".rdata", ".rdb", ".rdx", ".sqlite", ".db", ".dta", ".sav", ".sas7bdat"}
)
_UNSAFE_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# The maximum share of control characters in a text. Saved terminal output contains ESC characters, but far fewer than
# this.
_BINARY_SHARE = 0.1
# In UTF-16 text, one of the two bytes of a character is NUL at least this many times as often as the other byte.
_ASCII_SHARE = 10
# Text was wrongly read as Windows-1252 if it contains one of these: a byte that is no character in Windows-1252; four
# non-ASCII characters in a row (from Cyrillic or Chinese text); a character that appears in place of an umlaut or an
# accented letter from DOS or an old Mac; a capital after a small letter; a symbol inside a word. Symbols that people do
# write inside words (d’été, col·lecció, word—word, a±b) do not count.
_GIBBERISH = re.compile(
    r"[\x80-\x9f]|[^\x00-\x7f\s‘’“”«»…–—]{4}|[ŠšŽžŸˆ˜ƒ‡‰]|[a-zß-öø-ÿ][À-ÖØ-Þ]|[^\W\d_][„‚]"
    r"|[^\W\d_][“”†™¡-ª®-°²³¶¸-º¼-¿][^\W\d_]"
)
_GUESSED_ENCODINGS = [
    "gb18030",
    "big5",
    "cp932",
    "cp949",
    "koi8_r",
    "cp1251",
    "cp866",
    "cp1250",
    "cp1253",
    "cp1255",
    "cp1256",
]
# Encodings of DOS and old Macs. They use other bytes for accented letters than Windows does.
_OLD_WESTERN_ENCODINGS = ("cp850", "mac_roman")
# An encoding is guessed from pieces of the text. These values limit the bytes of a piece, and the number of pieces.
_PIECE_BYTES, _MAX_PIECES = 4_000, 100
_CONTROLS = re.compile(r"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
_ENCRYPTED_FLAG = 0x1
_UTF8_NAME = 0x800


class Unreadable(Exception):
    """A file can't be read. The message says why and what to do, and never contains the file's name.

    `bytes_read` counts the bytes that were read before the problem was found.
    """

    def __init__(self, reason: str, bytes_read: int = 0) -> None:
        super().__init__(reason)
        self.bytes_read = bytes_read


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """A file or an empty folder among a class's submissions."""

    # The path inside the folder or zip, with "/" between its parts. It can always be encoded as UTF-8.
    path: str
    load: Callable[[], bytes]  # returns at most MAX_FILE_BYTES; raises Unreadable
    problem: str = ""  # a problem that is known before the file is read
    is_folder: bool = False

    @property
    def ignored_kind(self) -> str:
        """The kind of file if it is nobody's work, such as `venv` or `.csv files`; "" for work."""
        path = PurePosixPath(self.path)
        folder = next((part.lower() for part in path.parts if part.lower() in _IGNORED_FOLDERS), "")
        return folder or (f"{path.suffix.lower()} files" if path.suffix.lower() in _DATA_SUFFIXES else "")


def replace_controls(text: str) -> str:
    """Replace lone surrogates and control characters (except newline and tab) with U+FFFD.

    The result encodes to UTF-8.
    """
    return _UNSAFE_CHARACTERS.sub("\ufffd", text)


def printable_path(path: Path) -> str:
    """Return a path in a form that an error message can show."""
    return replace_controls(str(path))


@contextmanager
def open_entries(path: Path) -> Iterator[list[ArchiveEntry]]:
    """Yield the entries of a folder, a zip, or one file, without hidden files and clutter. Read them inside the `with`.

    A zip inside the folder or zip belongs to a student, and is treated as a folder of its members.

    Raises SubmissionError if the path does not exist, or the zip is invalid, has too many members, or expands to too
    much.
    """
    # `Path.is_dir` raises an error for some paths. `os.path.isdir` returns False for them.
    if os.path.isdir(path):
        yield _unpack_zips(_folder_entries(path))
    elif not os.path.isfile(path):
        raise SubmissionError(f"{printable_path(path)}: there is no such file or folder")
    elif path.suffix.lower() == ".zip":
        with _open_zip(path) as archive:
            yield _unpack_zips(_zip_entries(path, archive))
    else:
        yield [ArchiveEntry(replace_controls(path.name), partial(read_file, path))]


def read_file(path: Path) -> bytes:
    """Read an ordinary file of at most MAX_FILE_BYTES. Raises Unreadable."""
    try:
        # Opening a pipe could wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("it is not an ordinary file")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"it can't be opened: {error.strerror or type(error).__name__}") from None
    if len(data) > MAX_FILE_BYTES:
        raise _too_large()
    return data


def _too_large() -> Unreadable:
    reason = f"it is larger than {MAX_FILE_BYTES // MIB} MiB; remove large outputs and hand it in again"
    return Unreadable(reason, MAX_FILE_BYTES)


def too_many_files() -> str:
    """Return the problem of a submission with more than MAX_MEMBERS files."""
    return f"the folder holds more than {MAX_MEMBERS:,} files; hand in the work alone"


def _is_clutter(path: str) -> bool:
    """Whether a file, or a folder around it, is hidden or clutter. Files in ignored folders are judged elsewhere."""
    parts = itertools.takewhile(lambda part: part.lower() not in _IGNORED_FOLDERS, PurePosixPath(path).parts)
    return any(part.startswith(".") or part.lower() in _CLUTTER for part in parts)


def decode_text(data: bytes) -> tuple[str, str, str]:
    """Decode a file. Returns its text, a note if the encoding was guessed, and a doubt if the guess may be wrong.

    Raises Unreadable if it is not text.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return _check_text(data.decode("utf-16", "replace")), "", ""
    low, high = data[1::2].count(0), data[::2].count(0)
    if max(low, high) > _ASCII_SHARE * min(low, high) and 4 * max(low, high) > len(data) // 2:
        return _check_text(data.decode("utf-16-le" if low > high else "utf-16-be", "replace")), "", ""
    try:
        return _check_text(data.decode("utf-8-sig")), "", ""
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    # Windows-1252 does not define five of the byte values, and decoding fails on them.
    with suppress(UnicodeDecodeError):
        text = data.decode("cp1252")
    note = "its encoding is not UTF-8; it was read as Windows-1252"
    return (_check_text(text), note, "") if not _GIBBERISH.search(text) else _guess(data, text)


def _guess(data: bytes, as_western: str) -> tuple[str, str, str]:
    """Decode text that can't be Western, as `decode_text`.

    A person who reads the doubt can see whether the guess was right.
    """
    from charset_normalizer import from_bytes  # imported here because the import is slow and rarely needed

    for encoding in _OLD_WESTERN_ENCODINGS:
        text = data.decode(encoding)
        if not _GIBBERISH.search(text) and text.encode("cp1252", "ignore").decode("cp1252") == text:
            return _check_text(text), "", _guess_doubt(text)
    pieces = [piece for piece in re.split(rb'["\r\n]', data) if len(piece) <= _PIECE_BYTES and not piece.isascii()]
    best = from_bytes(b"\n".join(pieces[:_MAX_PIECES]), cp_isolation=_GUESSED_ENCODINGS).best()
    text = _check_text(data.decode(best.encoding, "replace") if best and pieces else as_western)
    return text, "", _guess_doubt(text)


def _guess_doubt(text: str) -> str:
    excerpt = re.search(r".{0,20}[^\x00-\x7f].{0,20}", text)
    safe_excerpt = replace_controls(excerpt[0]) if excerpt else ""
    return f"its encoding is not UTF-8, and was guessed: is “{safe_excerpt}” what was written?"


def _check_text(text: str) -> str:
    if "\0" in text:
        raise Unreadable("it contains NUL bytes, so it is not a text file; hand in a text file")
    if text.count("\ufffd") + len(_CONTROLS.findall(text)) > _BINARY_SHARE * len(text):
        raise Unreadable("it is not a text file, or it is damaged; hand it in again")
    return text


# --- folders


def _folder_entries(root: Path) -> Iterator[ArchiveEntry]:
    for path in _listing(root, root):
        if _is_work_folder(path):
            yield from _subfolder_entries(path, root)
        else:
            yield _file_entry(path, root)


def _subfolder_entries(folder: Path, root: Path) -> list[ArchiveEntry]:
    """Return every file below `folder`. If there are none or too many, return one entry that stands for the folder."""
    name = replace_controls(folder.name)
    entries: list[ArchiveEntry] = []
    # Folders can be nested deeper than Python's call stack allows, so a stack replaces recursion.
    folder_stack = [folder]
    while folder_stack:
        try:
            paths = _listing(folder_stack.pop(), root)
        except SubmissionError as error:
            return [ArchiveEntry(name, lambda: b"", str(error), is_folder=True)]
        folder_stack += [path for path in paths if _is_work_folder(path)]
        entries += [_file_entry(path, root) for path in paths if not _is_work_folder(path)]
        if len(entries) + len(folder_stack) > MAX_MEMBERS:
            return [ArchiveEntry(name, lambda: b"", too_many_files(), is_folder=True)]
    return entries or [ArchiveEntry(name, lambda: b"", is_folder=True)]


def _is_work_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path) and path.name.lower() not in _IGNORED_FOLDERS


def _listing(folder: Path, root: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not _is_clutter(path.name))
    except OSError as error:
        subject = printable_path(folder) if folder == root else "the folder"
        raise SubmissionError(f"{subject} can't be opened: {error.strerror or type(error).__name__}") from None


def _file_entry(path: Path, root: Path) -> ArchiveEntry:
    name = replace_controls(path.relative_to(root).as_posix())
    return ArchiveEntry(name, partial(read_file, path), _link_problem(path, root))


def _link_problem(path: Path, root: Path) -> str:
    """Return "" if a link leads to a file of the same submission, else the problem.

    Elsewhere in the folder are classmates' files.
    """
    if not os.path.islink(path):
        return ""
    try:
        submission = root.resolve() / path.relative_to(root).parts[0]
        inside = path.resolve(strict=True).is_relative_to(submission)
    except (OSError, RuntimeError):  # the link is broken, or it leads back to itself
        inside = False
    return "" if inside and os.path.isfile(path) else "it is a link that doesn't lead to a file of this submission"


# --- zips


class _BoundedReader(io.BufferedReader):
    """Limits how much zipfile reads at once.

    zipfile reads the central directory in one call, and the file itself states the size.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        byte_count = _MAX_DIRECTORY_BYTES + 1 if size is None or size < 0 else size
        data = super().read(min(byte_count, _MAX_DIRECTORY_BYTES + 1))
        if len(data) > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile("its list of files is too large")
        return data


@dataclass(slots=True)
class _Meter:
    """Counts the uncompressed bytes of all members of one zip."""

    path: Path
    byte_count: int = 0

    def add(self, size: int) -> None:
        self.byte_count += size
        if self.byte_count > MAX_ZIP_BYTES:
            raise SubmissionError(
                f"{printable_path(self.path)} expands to more than {MAX_ZIP_BYTES // MIB} MiB; "
                "unpack it and name the folder"
            )


@contextmanager
def _open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        file = _BoundedReader(io.FileIO(path))
    except OSError as error:
        raise SubmissionError(f"{printable_path(path)} can't be opened: {error.strerror}") from None
    with file:
        try:
            archive = _parse_zip(file)
        except Unreadable as error:
            raise SubmissionError(f"{printable_path(path)} is not a readable zip: {error}") from None
        with archive:
            yield archive


def _parse_zip(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip.

    Raises Unreadable, with the reason only from zipfile's own errors: others would quote the file's bytes.
    """
    try:
        return zipfile.ZipFile(file)
    except Exception as error:  # noqa: BLE001  a damaged directory raises a dozen kinds
        reason = replace_controls(str(error)) if type(error) is zipfile.BadZipFile else type(error).__name__
        raise Unreadable(reason) from None


def _zip_entries(path: Path, archive: zipfile.ZipFile) -> list[ArchiveEntry]:
    meter = _Meter(path)
    entries = [_zip_entry(info, partial(_read_member, archive, info, meter)) for info in archive.infolist()]
    work_count = sum(not entry.ignored_kind for entry in entries)
    if work_count > MAX_ZIP_MEMBERS:
        raise SubmissionError(
            f"{printable_path(path)} holds {work_count:,} files, but at most {MAX_ZIP_MEMBERS:,} are read; "
            "remove the files that are not submissions"
        )
    return [entry for entry in entries if not _is_clutter(entry.path)]


def _unpack_zips(entries: Iterable[ArchiveEntry]) -> list[ArchiveEntry]:
    """Replace students' zips by their members. Zips inside these zips are not read."""
    zips = _StudentsZips()
    unpacked_entries: list[ArchiveEntry] = []
    for entry in entries:
        is_whole = entry.problem or entry.is_folder or PurePosixPath(entry.path).suffix.lower() != ".zip"
        unpacked_entries += [entry] if is_whole else zips.members(entry)
    return unpacked_entries


class _StudentsZips:
    """The zips among a class's files.

    The last one is kept open, because a student's files are read one after the other.
    """

    def __init__(self) -> None:
        self._outer: ArchiveEntry | None = None
        self._archive: zipfile.ZipFile | None = None

    def members(self, outer: ArchiveEntry) -> list[ArchiveEntry]:
        """Return the members of a zip as entries below its path.

        If there are none, or it can't be opened, return the zip with a problem.
        """
        try:
            infos = self._open(outer).infolist()
        except Unreadable:
            return [replace(outer, problem="the zip is damaged: hand it in again")]
        if not infos:
            return [replace(outer, problem="the zip is empty")]
        entries = [_zip_entry(info, partial(self._read, outer, info)) for info in infos]
        if sum(not entry.ignored_kind for entry in entries) > MAX_MEMBERS:
            return [ArchiveEntry(outer.path, lambda: b"", too_many_files(), is_folder=True)]
        inner_entries = [
            replace(entry, path=f"{outer.path}/{entry.path}") for entry in entries if not _is_clutter(entry.path)
        ]
        return inner_entries or [ArchiveEntry(outer.path, lambda: b"", is_folder=True)]

    def _open(self, outer: ArchiveEntry) -> zipfile.ZipFile:
        if self._archive is None or self._outer is not outer:
            self._archive = None  # frees the memory of the previous zip before the next one is read
            self._archive = _parse_zip(_BoundedReader(io.BytesIO(outer.load())))
            self._outer = outer
        return self._archive

    def _read(self, outer: ArchiveEntry, info: zipfile.ZipInfo) -> bytes:
        return _read_member(self._open(outer), info, _Meter(Path(outer.path)))


def _zip_entry(info: zipfile.ZipInfo, load: Callable[[], bytes]) -> ArchiveEntry:
    name = _member_name(info)
    if _is_path_trick(name):
        flat = replace_controls(re.sub(r"[/\\:\n\t]+", "_", name)).strip("._ ") or "unnamed"
        return ArchiveEntry(f"refused_{flat}", lambda: b"", "its path in the zip is unsafe, so it is not read")
    path = replace_controls(name.rstrip("/"))
    if name.endswith("/"):
        return ArchiveEntry(path, lambda: b"", is_folder=True)
    return ArchiveEntry(path, load, _member_problem(info))


def _member_name(info: zipfile.ZipInfo) -> str:
    """Return a member's name.

    zipfile reads names not marked as UTF-8 as cp437, but macOS and many tools omit the mark.
    """
    name = info.orig_filename
    if info.flag_bits & _UTF8_NAME:
        return name
    try:
        return name.encode("cp437").decode("utf-8")
    except UnicodeError:
        return name


def _is_path_trick(name: str) -> bool:
    parts = name.removesuffix("/").split("/")
    if "\\" in name or re.match(r"[A-Za-z]:", name) or _UNSAFE_CHARACTERS.search(name) or "\n" in name or "\t" in name:
        return True
    return any(part in ("", ".", "..") for part in parts)  # an absolute path has an empty part


def _member_problem(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & _ENCRYPTED_FLAG:
        return "it is encrypted; hand it in without a password"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "it is a link, not a file"
    # With bzip2 and lzma, a small file can expand to any size, and lzma can use any amount of memory.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "it is compressed in a way that isn't read; use an ordinary zip (deflate)"
    return ""


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, meter: _Meter) -> bytes:
    bytes_before = meter.byte_count
    try:
        with archive.open(info) as file:
            data = io.BytesIO()  # joining a list of chunks would keep the content in memory twice
            data.writelines(_meter_chunks(iter(partial(file.read, _CHUNK), b""), info.compress_size, meter))
            return data.getvalue()
    except (Unreadable, SubmissionError):
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise Unreadable("it is damaged in the zip; hand it in again", meter.byte_count - bytes_before) from None
    except Exception as error:  # noqa: BLE001  a damaged member raises a dozen kinds
        raise Unreadable(
            f"it can't be read from the zip ({type(error).__name__})", meter.byte_count - bytes_before
        ) from None


def _meter_chunks(chunks: Iterator[bytes], compressed_size: int, meter: _Meter) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        meter.add(len(chunk))
        if size > MAX_FILE_BYTES:
            raise _too_large()
        if size > RATIO_FREE_BYTES and size > MAX_RATIO * compressed_size:
            raise Unreadable(
                f"it is not read, because it grows more than {MAX_RATIO}-fold when it is unpacked, like a zip bomb",
                size,
            )
        yield chunk

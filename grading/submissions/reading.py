"""Reads students' submissions from a folder, a zip or one file into parts.

Each top-level file is a submission, and so is each top-level subfolder or zip, made of its readable files. If something
is wrong with one submission, its `problem` says so, and the rest of the class is read. Only `Submission.name` may
identify a student: parts, notes and problems never contain a file's name. R Markdown headers and notebook metadata are
left out.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from grading.submissions.archives import (
    MAX_SUBMISSION_BYTES,
    MIB,
    ArchiveEntry,
    Unreadable,
    decode_text,
    open_entries,
    printable_path,
    replace_controls,
)
from grading.submissions.documents import read_docx, read_pdf, text_document, without_exports
from grading.submissions.handed_in import FileGroup, resolve
from grading.submissions.lms_names import is_late, same_student
from grading.submissions.notebooks import (
    clean_source,
    html_to_text,
    language_name,
    read_notebook,
    shorten,
    slim_notebook,
    water_level,
    without_header,
)
from grading.submissions.submission import PartKind, Submission, SubmissionPart
from grading.submissions.visible import MAX_PASSAGES, visible_text
from messages.errors import SubmissionError
from producers.words import plural

__all__ = [
    "READABLE",
    "PartKind",
    "Submission",
    "SubmissionPart",
    "check_apart",
    "inputs_inside",
    "list_submissions",
    "read_document",
    "read_submissions",
]

_CHUNK_START = re.compile(r"[\t >]*`{3,}\s*\{([A-Za-z]\w*).*\}\s*$")
_CHUNK_END = re.compile(r"[\t >]*`{3,}\s*$")
# Limits on how many characters of one submission are kept. No prompt needs more, and every later step goes through all
# of them.
_MAX_CHARS: dict[PartKind, int] = {"code": 150_000, "text": 150_000, "output": 720_000}
_MAX_PARTS = 10_000
_VERY_LONG = "very long"
# Limit for one file that is not a notebook.
_MAX_TEXT_BYTES = MIB // 2
# Limit for all files of a student together. Only a quarter of a notebook's bytes counts, and only a sixteenth of a
# document's bytes.
MAX_FOLDER_BYTES = 4 * MIB
_DATA_URI = re.compile(rb"(data:[\w.+-]{1,60}/[\w.+-]{1,60};base64,)[A-Za-z0-9+/=%]*")
# First lines of a Git LFS pointer, in each version of the specification (git-lfs/git-lfs, docs/spec.md).
_LFS_POINTER = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")
# A text that consists only of a URL, or only of a Markdown link.
_ONLY_LINK = re.compile(r"(?:\[[^\]\n]{0,300}\]\()?<?((?:https?://|www\.)[^\s<>]{1,2000}?)>?\)?", re.IGNORECASE)
# If a student hands in a URL, the file from Canvas is a page that redirects to that URL (canvas-lms,
# app/views/assignments/redirect_page.html.erb).
_REDIRECT = re.compile(
    r"""<meta\s{1,9}http-equiv=["']?refresh["']?\s{1,9}content=["']?\d{1,9};\s{0,9}url=([^"'<>\s]+)""", re.IGNORECASE
)
# If a student types a text into Canvas, the file is a page (text_entry_page.html.erb) with the names of assignment and
# author in its title, and again in its heading.
_PAGE_HEADING = re.compile(r"<title>(.{0,999}?)</title>\s*</head>\s*<body>\s*<h1>\1</h1>")
# Types of file that contain no answer: pictures, and the usual files of a project. If the submission has other work,
# a file of these types gets only a note. For a file of any other unreadable type, a person is asked whether it is work.
_NO_ANSWER = frozenset(
    {".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".bmp", ".tif", ".tiff", ".heic", ".ico", ".css", ".rproj"}
    | {".lock", ".toml", ".yml", ".yaml", ".cfg", ".ini", ".bib", ".log", "license", "makefile", "dockerfile"}
)
_TINY_BYTES = 100  # smaller files can be equal by chance
_MOODLE_FOLDER = "_assignsubmission_"  # occurs in the name of each student's folder from Moodle


def inputs_inside(folder: Path, input_files: Mapping[str, Path | None]) -> dict[str, str]:
    """Return the input files inside the submissions' folder.

    The keys are their paths there, the values their purposes, such as "the rubric".
    """
    root = folder.resolve()
    if not os.path.isdir(root):  # only a folder can contain input files, which must not be read as submissions
        return {}
    places = (
        (purpose, file.parent.resolve() / file.name, file.resolve()) for purpose, file in input_files.items() if file
    )
    inside = [
        (place, purpose)
        for purpose, named_path, real_path in places
        for place in (named_path, real_path)
        if root in place.parents
    ]
    return {place.relative_to(root).as_posix(): purpose for place, purpose in inside}


def check_apart(folder: Path, results: Path, option: str = "--out") -> None:
    """Raise SubmissionError if files written to `results` would later be read as submissions."""
    root, place = folder.resolve(), results.resolve()
    if os.path.isdir(root) and root in (place, *place.parents):
        raise SubmissionError(
            f"{printable_path(results)} {('is' if place == root else 'is inside')} the submissions folder, so "
            f"the next run would read the results as submissions: choose a folder elsewhere with {option}"
        )


def read_submissions(
    path: Path,
    names: Collection[str] = (),
    limit: int = 0,
    lenient: bool = False,
    excluded_paths: Container[str] = (),
    student_of: Callable[[str], str] = same_student,
) -> list[Submission]:
    """Read the submissions in a folder or zip, or the one in a file, sorted by name.

    A zip that holds nothing but one folder is read as that folder, if it contains two or more subfolders or files of
    one kind. File managers make such zips of a class, and reading a class as one student would be worse than the
    reverse.

    Args:
        path: a folder, a .zip, or one file.
        names: file names, names without suffix, or Canvas user ids; () for all.
        limit: read only this many, the first by name; 0 for all.
        lenient: don't raise if a name in `names` matches nothing.
        excluded_paths: paths of files in the folder that are not submissions.
        student_of: see `resolve`.

    Raises:
        SubmissionError: there is nothing of a readable kind, the zip is damaged or expands to too much, or a name in
            `names` matches nothing.
    """
    with _selected_groups(path, names, limit, lenient, excluded_paths, student_of) as groups:
        return [_with_notes(group, _read_group(group)) for group in groups]


def list_submissions(
    path: Path,
    names: Collection[str] = (),
    limit: int = 0,
    lenient: bool = False,
    excluded_paths: Container[str] = (),
    student_of: Callable[[str], str] = same_student,
) -> list[str]:
    """Return the names of the submissions that `read_submissions` would read, without reading files.

    Raises as it does.
    """
    with _selected_groups(path, names, limit, lenient, excluded_paths, student_of) as groups:
        return [group.name for group in groups]


def read_document(path: Path) -> Submission:
    """Read a solution or template from one file. Raises SubmissionError if it can't be read."""
    if os.path.isdir(path) or path.suffix.lower() == ".zip":
        raise SubmissionError(f"{printable_path(path)} is a folder or a zip: name a single file")
    document = read_submissions(path)[0]
    if document.problem:
        raise SubmissionError(f"{printable_path(path)} can't be read: {document.problem}")
    if cut := next((note for note in document.notes if note.startswith(_VERY_LONG)), ""):
        raise SubmissionError(f"{printable_path(path)} is too long to be in every prompt of the class: {cut}")
    return document


def notebooks_of(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the notebooks, as bytes, of the submission that has this name in `read_submissions(path)`.

    Each comes with the text that precedes "cell 1" in the locations of its parts. Raises SubmissionError if the path
    can't be read. Unreadable notebooks are left out.
    """
    with open_entries(path) as entries:
        groups = _groups(path, entries)
        group = next((group for group in groups if group.name == name), None)
        files = _readable(group) if group else []
        for label, entry in zip(_labels(files), files, strict=True):
            with suppress(Unreadable):
                data = _load_entry(entry)
                if _kind(entry.path, data) == ".ipynb":
                    yield _with_label(label, "", ", "), data


# --- the files of a submission


def _groups(
    path: Path, entries: Sequence[ArchiveEntry], student_of: Callable[[str], str] = same_student
) -> list[FileGroup]:
    work = [entry for entry in entries if not entry.ignored_kind]
    wrapper = _wrapper(work) if path.suffix.lower() == ".zip" else ""
    return resolve(_group_entries(entries, wrapper), _readability, student_of)


@contextmanager
def _selected_groups(
    path: Path,
    names: Collection[str],
    limit: int,
    lenient: bool,
    excluded_paths: Container[str],
    student_of: Callable[[str], str],
) -> Iterator[list[FileGroup]]:
    """Select groups of files as `read_submissions` describes. The files can be read until the context ends."""
    if limit < 0:
        raise SubmissionError(f"limit must be 0 (all) or more, not {limit}")
    with open_entries(path) as all_entries:
        groups = _groups(path, [entry for entry in all_entries if entry.path not in excluded_paths], student_of)
        if not any(_readable(group) for group in groups):
            raise SubmissionError(
                f"{printable_path(path)} holds no submission that can be read; these kinds of file can be read: "
                f"{', '.join(_READERS)}"
            )
        selected_groups = _select_groups(groups, names, path, lenient)
        yield selected_groups[:limit] if limit else selected_groups


def _with_notes(group: FileGroup, submission: Submission) -> Submission:
    """Add the notes that follow from the submission's name, and from the student's other files."""
    notes = ["handed in late"] if is_late(group.name) else []
    if group.extra_files:
        notes.append(f"graded with {plural(group.extra_files, 'more file')} of the same student")
    earlier_files = plural(len(group.superseded_names), "earlier file")
    superseded_note = f"the latest counts: {earlier_files} of the same student left out"
    doubts = [superseded_note] if group.superseded_names else []
    return replace(
        submission,
        notes=(*submission.notes, *notes, *doubts),
        doubtful_notes=(*submission.doubtful_notes, *doubts),
        superseded_names=tuple(group.superseded_names),
        ignored_kinds=tuple(sorted({entry.ignored_kind for entry in group.entries} - {""})),
    )


def _read_group(group: FileGroup) -> Submission:
    """Read one submission. If something is wrong with it, its `problem` says so."""
    try:
        group.check()
        submission = _read_files(group)
    except Unreadable as error:
        return Submission(group.name, "", (), problem=str(error))
    except SubmissionError:
        raise
    except Exception as error:  # noqa: BLE001  a bug of ours in one file must not stop the class
        return Submission(group.name, "", (), problem=f"reading it failed ({type(error).__name__}): a bug in Kvasir")
    parts, notes = _bound_parts(submission.parts)
    return replace(submission, name=group.name, parts=parts, notes=(*submission.notes, *notes))


def _bound_parts(parts: tuple[SubmissionPart, ...]) -> tuple[tuple[SubmissionPart, ...], list[str]]:
    """Limit the number and size of parts. Also returns notes for the instructor.

    Small parts stay whole; the largest are cut.
    """
    notes = [f"only its first {_MAX_PARTS:,} of {len(parts):,} parts are read"] if len(parts) > _MAX_PARTS else []
    bounded_parts = parts[:_MAX_PARTS]
    for kind, max_chars in _MAX_CHARS.items():
        sizes = [len(part.text) for part in bounded_parts if part.kind == kind]
        if sum(sizes) > max_chars:
            level = water_level(sizes, max_chars)
            notes.append(f"{_VERY_LONG}: only {max_chars:,} of {sum(sizes):,} characters of {kind} are read")
            bounded_parts = tuple(
                replace(part, text=shorten(part.text, level)) if part.kind == kind else part for part in bounded_parts
            )
    return bounded_parts, notes


def _wrapper(entries: Iterable[ArchiveEntry]) -> str:
    """Return the folder, with a slash, if a zip holds a whole class inside one folder; else ""."""
    paths = [entry.path + "/" * entry.is_folder for entry in entries if "/" in entry.path or not entry.problem]
    tops = {path.partition("/")[0] if "/" in path else "" for path in paths}
    top = tops.pop() if len(tops) == 1 else ""
    if not top or _MOODLE_FOLDER in top:
        return ""
    inside = {path.split("/", 2)[1] + "/" * (path.count("/") > 1) for path in paths if _suffix(path) in _READERS}
    kinds = Counter("/" if name.endswith("/") else _suffix(name) for name in inside)
    return f"{top}/" if max(kinds.values(), default=0) > 1 else ""


def _group_entries(entries: Iterable[ArchiveEntry], wrapper: str) -> list[FileGroup]:
    groups: dict[str, FileGroup] = {}
    for entry in entries:
        prefix = wrapper if entry.path.startswith(wrapper) else ""
        top, slash, _ = entry.path.removeprefix(prefix).partition("/")
        if entry.path == wrapper.rstrip("/") or top.lower() == entry.ignored_kind:
            continue
        group = groups.setdefault(prefix + top, FileGroup(prefix + top))
        group.is_folder |= bool(slash) or entry.is_folder
        group.entries.append(entry)
    return sorted(groups.values(), key=lambda group: group.name)


def _select_groups(groups: list[FileGroup], names: Collection[str], path: Path, lenient: bool) -> list[FileGroup]:
    unknown_names = [name for name in names if not any(group.matches(name) for group in groups)]
    if unknown_names and not lenient:
        quoted_names = ", ".join(repr(replace_controls(name)) for name in unknown_names)
        raise SubmissionError(f"{printable_path(path)} holds no submission named {quoted_names}")
    return [group for group in groups if not names or any(group.matches(name) for name in names)]


# --- reading one submission


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def _load_entry(entry: ArchiveEntry) -> bytes:
    """Return the content of a file. Raises Unreadable."""
    if entry.problem:
        raise Unreadable(entry.problem)
    return entry.load()


def _kind(path: str, data: bytes) -> str:
    """Return the suffix that decides how a file is read. Browsers and editors append .txt, as in notebook.ipynb.txt."""
    suffix = _suffix(path)
    if suffix != ".txt":
        return suffix
    if data[:64].lstrip(b"\xef\xbb\xbf \r\n").startswith(b"{") and b'"cells"' in data and b'"cell_type"' in data:
        return ".ipynb"
    inner = _suffix(PurePosixPath(path).stem)
    return inner if inner in _READERS and inner not in (".ipynb", *_BINARY) else suffix


def _parse(data: bytes, cut: str, path: str, suffix: str) -> Submission:
    """Raises Unreadable."""
    if data.startswith(_LFS_POINTER):
        raise Unreadable("it is only a Git LFS pointer to the file; hand in the file itself")
    text, note, doubt = (data, "", "") if suffix in _BINARY else decode_text(data)
    if suffix == ".ipynb" and _has_conflict(str(text)):
        raise Unreadable("it holds an unresolved merge conflict; resolve the conflict and hand the file in again")
    document = _READERS[suffix](text, suffix)
    kind = "notebook" if suffix == ".ipynb" else "file"
    rename_note = f"named .txt, but it is a {kind} ({suffix}): read as that" if suffix != _suffix(path) else ""
    is_conflict = any(_has_conflict(part.text) for part in document.parts)
    doubts = tuple(filter(None, (doubt, "it holds an unresolved merge conflict" if is_conflict else "")))
    only_link = _ONLY_LINK.fullmatch(document.parts[0].text.strip()) if len(document.parts) == 1 else None
    return replace(
        document,
        notes=(*filter(None, (note, rename_note, cut)), *doubts, *document.notes),
        doubtful_notes=(*doubts, *document.doubtful_notes),
        link=only_link[1] if only_link else "",
        file_digests=(hashlib.blake2b(data, digest_size=8).hexdigest(),) if len(data) >= _TINY_BYTES else (),
    )


def _has_conflict(text: str) -> bool:
    """Whether git's three conflict marks are in the text, in order, each at the beginning of a line."""
    start = re.search("^<<<<<<< ", text, re.MULTILINE)
    middle = text.find("\n=======", start.end()) if start else -1
    return middle >= 0 and text.find("\n>>>>>>> ", middle) >= 0


def _slim(data: bytes, suffix: str) -> tuple[bytes, str]:
    """Cut a file to the size that is read, and return a note if it was cut. Raises Unreadable."""
    if suffix == ".ipynb":
        return slim_notebook(data), ""
    if suffix in _BINARY:
        return data, ""
    short = _DATA_URI.sub(rb"\1", data[: 8 * _MAX_TEXT_BYTES])
    if len(short) <= _MAX_TEXT_BYTES and len(data) <= 8 * _MAX_TEXT_BYTES:
        return short, ""
    end = min(len(short), _MAX_TEXT_BYTES)
    # Move the cut back to the beginning of a UTF-8 character.
    end = next((end - offset for offset in (1, 2, 3) if short[end - offset] >= 0xC0), end)
    return short[:end], f"{_VERY_LONG}: only its first {end >> 10:,} KiB are read"


def _kind_of(path: str) -> str:
    suffix = _suffix(path)
    known_type = f"files of type {suffix}" if re.fullmatch(r"\.[a-z0-9]{1,5}", suffix) else "files without a known type"
    return "zips inside" if suffix == ".zip" else known_type


def _read_files(group: FileGroup) -> Submission:
    """Read a group's files as one submission. Raises Unreadable if none of them can be read."""
    for entry in group.entries:
        if entry.problem and (entry.is_folder or not group.is_folder):
            raise Unreadable(entry.problem)
    if not _readable(group):
        kind = f"{_kind_of(group.entries[0].path)} can't be read"
        subject = "the folder holds no file that can be read" if group.is_folder else kind
        raise Unreadable(f"{subject}; hand in one of: {', '.join(_READERS)}")
    labels = _labels(_readable(group))
    files, problems = _read_all(_readable(group), labels)
    if not files:
        raise Unreadable("; ".join(problems[:5]))
    files = without_exports(files)
    skipped, doubtful = _skipped_files(group)
    notes, doubts = [*skipped, *doubtful, *problems], [*doubtful, *problems]
    for label, file in files:
        notes += [_with_label(label, note, ": ") for note in file.notes]
        doubts += [_with_label(label, doubt, ": ") for doubt in file.doubtful_notes]
    parts = [
        replace(part, location=_with_label(label, part.location, ", ")) for label, file in files for part in file.parts
    ]
    links = [file.link for _, file in files if not file.empty]
    return Submission(
        "",
        _main_language(file for _, file in files),
        tuple(parts),
        sum(file.images_left_out for _, file in files),
        tuple(notes),
        doubtful_notes=tuple(doubts),
        link=" ".join(links) if all(links) else "",
        file_digests=tuple(digest for _, file in files for digest in file.file_digests),
    )


def _labels(files: list[ArchiveEntry]) -> list[str]:
    """Return a number for each file, in order of name.

    File names are not shown, because students put their own names in them.
    """
    numbered = [f"file {number} ({_suffix(entry.path)})" for number, entry in enumerate(files, 1)]
    return [""] if len(files) == 1 else numbered


def _with_label(label: str, text: str, separator: str) -> str:
    return f"{label}{separator}{text}" if label else text


def _read_all(entries: list[ArchiveEntry], labels: list[str]) -> tuple[list[tuple[str, Submission]], list[str]]:
    """Read files. Returns their content, and the problems of unreadable ones.

    Raises Unreadable if they are too much together.
    """
    files, problems, bytes_read, bytes_scanned = [], [], 0, 0
    for label, entry in zip(labels, entries, strict=True):
        try:
            entry_bytes = _load_entry(entry)
            bytes_read += len(entry_bytes)
            suffix = _kind(entry.path, entry_bytes)
            data, cut = _slim(entry_bytes, suffix)
            del entry_bytes
            bytes_scanned += len(data) // {".ipynb": 4, ".docx": 16, ".pdf": 16}.get(suffix, 1)
            if bytes_scanned > MAX_FOLDER_BYTES:
                raise Unreadable(
                    f"it is left out, because the folder's text is longer than {MAX_FOLDER_BYTES // MIB} MiB"
                )
            files.append((label, _parse(data, cut, entry.path, suffix)))
        except Unreadable as error:
            bytes_read += error.bytes_read
            problems.append(_with_label(label, str(error), ": "))
        if bytes_read > MAX_SUBMISSION_BYTES:
            raise Unreadable(f"its files have more than {MAX_SUBMISSION_BYTES // MIB} MiB together; remove large files")
    return files, problems


def _readable(group: FileGroup) -> list[ArchiveEntry]:
    """Return the files of a readable kind, sorted by path."""
    work = (entry for entry in group.entries if not entry.is_folder and not entry.ignored_kind)
    return sorted((entry for entry in work if _suffix(entry.path) in _READERS), key=lambda entry: entry.path)


def _readability(group: FileGroup) -> int:
    """Rank a group by what can be read of it.

    The rank is 2 if it has text files, 1 if it has only documents, which need an extra, and 0 if nothing can be read.
    It must not depend on whether the extra is installed: it decides the submission's name, which identifies its row and
    jobs.
    """
    suffixes = {_suffix(entry.path) for entry in _readable(group)}
    return bool(suffixes) + bool(suffixes.difference(_BINARY))


def _skipped_files(group: FileGroup) -> list[list[str]]:
    """Return notes on files that are not read, one for each kind.

    The first list is about files that hold no answer, the second about files that may.
    """
    counts: list[Counter[str]] = [Counter(), Counter()]
    for entry in group.entries:
        if not (entry.is_folder or entry.ignored_kind or _suffix(entry.path) in _READERS):
            may_hold_work = (_suffix(entry.path) or PurePosixPath(entry.path).name.lower()) not in _NO_ANSWER
            counts[may_hold_work][entry.problem or f"{_kind_of(entry.path)} can't be read"] += 1
    return [[f"{plural(number, 'file')} left out: {why}" for why, number in sorted(kinds.items())] for kinds in counts]


def _main_language(files: Iterable[Submission]) -> str:
    """Return the language with the most code."""
    sizes: Counter[str] = Counter()
    for file in files:
        sizes[file.language] += sum(len(part.text) for part in file.parts if part.kind == "code")
    return _largest(sizes)


def _largest(sizes: Mapping[str, int]) -> str:
    """Return the name with the largest size, the first of several; "" if there is none."""
    return max(sorted(filter(None, sizes)), key=sizes.__getitem__, default="")


# --- kinds of file


def _notebook(text: str, _suffix: str) -> Submission:
    if not text.strip():
        raise Unreadable("the file is empty")
    return read_notebook(text)


def _script(text: str, suffix: str) -> Submission:
    code, images = clean_source(text)
    parts = (SubmissionPart("code", code.strip("\n"), "script"),) if code.strip() else ()
    return Submission("", {".r": "R", ".py": "Python", ".sql": "SQL"}[suffix], parts, images)


def _prose(text: str, suffix: str) -> Submission:
    prose, images = clean_source(text)
    return text_document(without_header(prose) if suffix == ".md" else prose, images)


def _page(text: str, _suffix: str) -> Submission:
    """Read what a student typed into the LMS's editor, or the address that was entered there."""
    if redirect := _REDIRECT.search(text):
        return text_document(redirect[1])  # Canvas does not escape the URL
    markup = _PAGE_HEADING.sub("</head><body>", text)
    hidden_passages = visible_text(markup, "html").hidden_passages[:MAX_PASSAGES]
    doubts = tuple(f"hidden text left out: “{passage}”" for passage in hidden_passages)
    return text_document(*html_to_text(markup), *doubts)


def _markdown_with_chunks(text: str, suffix: str) -> Submission:
    """Read R Markdown or Quarto: executable chunks are code, the rest is prose, and the header is left out."""
    text, images = clean_source(text)
    chunks = list(_split_chunks(without_header(text)))
    parts: list[SubmissionPart] = []
    numbers: Counter[PartKind] = Counter()
    languages: Counter[str] = Counter()
    for language, chunk in chunks:
        kind: PartKind = "text" if language is None else "code"
        numbers[kind] += kind == "code" or bool(chunk.strip())
        if chunk.strip():
            name = "chunk" if kind == "code" else "text"
            parts.append(SubmissionPart(kind, chunk, f"{name} {numbers[kind]}"))
            languages[language or ""] += len(chunk)
    notes = ("the last code chunk is never closed",) if chunks[-1][0] is not None else ()
    return Submission("", _largest(languages) or ("R" if suffix == ".rmd" else ""), tuple(parts), images, notes)


def _split_chunks(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield the chunks with their language ("" if unknown), and the prose between them with None."""
    language: str | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        start = _CHUNK_START.match(line) if language is None else None
        if start or (language is not None and _CHUNK_END.match(line)):
            yield language, "\n".join(lines).strip("\n")
            language, lines = language_name(start[1]) if start else None, []
        else:
            lines.append(line)
    yield language, "\n".join(lines).strip("\n")


_READERS: dict[str, Callable[[Any, str], Submission]] = {
    ".ipynb": _notebook,
    ".r": _script,
    ".rmd": _markdown_with_chunks,
    ".qmd": _markdown_with_chunks,
    ".py": _script,
    ".sql": _script,
    ".md": _prose,
    ".txt": _prose,
    ".html": _page,
    ".docx": read_docx,
    ".pdf": read_pdf,
}
_BINARY = (".docx", ".pdf")  # the readers of these kinds get bytes, all others get text
READABLE = tuple(_READERS)

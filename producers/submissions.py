"""Students' submissions: a folder, a zip or one file, read into parts.

Each top-level file is a submission; each top-level subfolder is one, made of its readable files. What is wrong with
one submission is its `problem`, and the rest of the class goes on. Only `Submission.name` may identify a student:
parts, notes and problems never hold a file's name, and R Markdown headers and notebook metadata are left out.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from messages.errors import SubmissionError
from producers.archives import (
    MAX_FILE_BYTES,
    MIB,
    Entry,
    Unreadable,
    decode_text,
    open_entries,
    replace_controls,
    shown,
)
from producers.handed_in import Group, resolve
from producers.names import canvas_id, is_late
from producers.notebooks import (
    Document,
    Part,
    PartKind,
    clean_source,
    html_to_text,
    language_name,
    read_notebook,
    without_header,
)

__all__ = ["Part", "PartKind", "Submission", "canvas_id", "read_document", "read_submissions"]

_CHUNK_START = re.compile(r"[\t >]*`{3,}\s*\{([A-Za-z]\w*).*\}\s*$")
_CHUNK_END = re.compile(r"[\t >]*`{3,}\s*$")
_MOODLE_FOLDER = "_assignsubmission_"  # in the name of each student's folder


@dataclass(frozen=True, slots=True)
class Submission:
    """One student's work, or a solution or template. `parts` is empty if `problem` says why it can't be read."""

    name: str  # relative to the folder or zip; may hold a student's name: stays with the producer, never in a queue
    language: str  # "R", "Python", "SQL", …; "" if unknown
    parts: tuple[Part, ...]
    images_left_out: int = 0
    notes: tuple[str, ...] = ()  # what an instructor should know
    problem: str = ""
    superseded: tuple[str, ...] = ()  # names of what the same student handed in before: left out, the latest counts

    @property
    def empty(self) -> bool:
        """Readable, but without code or text of its own."""
        return not self.problem and all(part.kind == "output" for part in self.parts)


def read_submissions(path: Path, only: Collection[str] = (), limit: int = 0) -> list[Submission]:
    """The submissions in a folder or zip, or the one in a file, sorted by name.

    A zip that holds nothing but one folder, with two or more files of one kind or subfolders in it, is read as that
    folder: file managers make such zips of a class, and taking a class for one student would be worse than the reverse.

    Args:
        path: a folder, a .zip, or one file.
        only: file names, names without suffix, or Canvas user ids; () for all.
        limit: at most so many, the first by name; 0 for all.

    Raises:
        SubmissionError: nothing there is of a kind that can be read, the zip is damaged or expands to too much, or a
            name in `only` matches nothing.
    """
    if limit < 0:
        raise SubmissionError(f"limit must be 0 (all) or more, not {limit}")
    with open_entries(path) as entries:
        groups = resolve(_grouped(entries, _wrapper(entries) if path.suffix.lower() == ".zip" else ""))
        if not any(_readable(group) for group in groups):
            kinds = ", ".join(_READERS)
            raise SubmissionError(f"{shown(path)} holds no submission that can be read; these kinds are: {kinds}")
        chosen = _chosen(groups, only, path)
        return [_noted(group, _read(group)) for group in (chosen[:limit] if limit else chosen)]


def read_document(path: Path) -> Submission:
    """A solution or template: one file. Raises SubmissionError if it can't be read."""
    if os.path.isdir(path) or path.suffix.lower() == ".zip":
        raise SubmissionError(f"{shown(path)}: name one file, not a folder or zip")
    document = read_submissions(path)[0]
    if document.problem:
        raise SubmissionError(f"{shown(path)} can't be read: {document.problem}")
    return document


# --- which files make a submission


def _noted(group: Group, submission: Submission) -> Submission:
    """With what its name and its student's other files say."""
    notes = [*submission.notes]
    if is_late(group.name):
        notes.append("handed in late")
    if group.joined:
        notes.append(f"{group.joined} more files of the same student are graded with it")
    if group.superseded:
        notes.append(f"{len(group.superseded)} earlier files of the same student are left out: the latest counts")
    return replace(submission, notes=tuple(notes), superseded=tuple(group.superseded))


def _read(group: Group) -> Submission:
    """One submission; what is wrong with it is its problem."""
    try:
        group.check_names()
        document = _read_folder(group) if group.is_folder else _read_file(group.entries[0])
    except Unreadable as error:
        return Submission(group.name, "", (), problem=str(error))
    except SubmissionError:
        raise
    except Exception as error:  # noqa: BLE001  a bug of ours in one file must not stop the class
        return Submission(group.name, "", (), problem=f"reading it failed ({type(error).__name__}): a bug in Kvasir")
    return Submission(group.name, document.language, document.parts, document.images_left_out, document.notes)


def _wrapper(entries: Iterable[Entry]) -> str:
    """The one folder, with a slash, that holds a whole class's work in a zip; "" if there is none."""
    paths = [entry.path + "/" * entry.is_folder for entry in entries if "/" in entry.path or not entry.problem]
    tops = {path.partition("/")[0] if "/" in path else "" for path in paths}
    top = tops.pop() if len(tops) == 1 else ""
    if not top or _MOODLE_FOLDER in top:
        return ""
    inside = {path.split("/", 2)[1] + "/" * (path.count("/") > 1) for path in paths if _suffix(path) in _READERS}
    kinds = Counter("/" if name.endswith("/") else _suffix(name) for name in inside)
    return f"{top}/" if max(kinds.values(), default=0) > 1 else ""


def _grouped(entries: Iterable[Entry], wrapper: str) -> list[Group]:
    groups: dict[str, Group] = {}
    for entry in entries:
        prefix = wrapper if entry.path.startswith(wrapper) else ""
        if entry.path == wrapper.rstrip("/"):
            continue
        top, slash, _ = entry.path.removeprefix(prefix).partition("/")
        group = groups.setdefault(prefix + top, Group(prefix + top))
        group.is_folder |= bool(slash) or entry.is_folder
        group.entries.append(entry)
    return sorted(groups.values(), key=lambda group: group.name)


def _chosen(groups: list[Group], only: Collection[str], path: Path) -> list[Group]:
    for wanted in only:
        if not any(group.matches(wanted) for group in groups):
            raise SubmissionError(f"{shown(path)} holds no submission named {replace_controls(wanted)!r}")
    return [group for group in groups if not only or any(group.matches(wanted) for wanted in only)]


# --- reading one submission


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def _read_file(entry: Entry) -> Document:
    """Raises Unreadable."""
    suffix = _suffix(entry.path)
    if entry.problem:
        raise Unreadable(entry.problem)
    if suffix not in _READERS:
        raise Unreadable(f"{_kind_of(entry.path)} can't be read; hand in one of: {', '.join(_READERS)}")
    text, note = decode_text(entry.read())
    document = _READERS[suffix](text, suffix)
    return replace(document, notes=(note, *document.notes)) if note else document


def _kind_of(path: str) -> str:
    suffix = _suffix(path)
    if suffix == ".zip":
        return "zips inside"
    return f"files of type {suffix}" if re.fullmatch(r"\.[a-z0-9]{1,5}", suffix) else "files without a known type"


def _read_folder(group: Group) -> Document:
    """The readable files of a folder as one document. Raises Unreadable if not one of them could be read."""
    for entry in group.entries:
        if entry.is_folder and entry.problem:
            raise Unreadable(entry.problem)
    if not _readable(group):
        raise Unreadable(f"the folder holds no file that can be read; hand in one of: {', '.join(_READERS)}")
    labels = _labels(_readable(group))
    documents, problems = _read_all(_readable(group), labels)
    if not documents:
        raise Unreadable("; ".join(problems[:5]))
    notes = [*_left_out(group), *problems]
    for label, document in documents:
        notes += [_labelled(label, note, ": ") for note in document.notes]
    parts = [
        replace(part, where=_labelled(label, part.where, ", "))
        for label, document in documents
        for part in document.parts
    ]
    images = sum(document.images_left_out for _, document in documents)
    return Document(tuple(parts), _main_language(documents), images, tuple(notes))


def _labels(files: list[Entry]) -> list[str]:
    """Numbers in order of name instead of names: students put their own into them."""
    if len(files) == 1:
        return [""]
    return [f"file {number} ({_suffix(entry.path)})" for number, entry in enumerate(files, 1)]


def _labelled(label: str, text: str, separator: str) -> str:
    return f"{label}{separator}{text}" if label else text


def _read_all(files: list[Entry], labels: list[str]) -> tuple[list[tuple[str, Document]], list[str]]:
    documents, problems, size = [], [], 0
    for label, entry in zip(labels, files, strict=True):
        try:
            document = _read_file(entry)
            size += sum(len(part.text) for part in document.parts)
            if size > MAX_FILE_BYTES:
                raise Unreadable(f"left out, because the folder's text is longer than {MAX_FILE_BYTES // MIB} MiB")
        except Unreadable as error:
            problems.append(_labelled(label, str(error), ": "))
        else:
            documents.append((label, document))
    return documents, problems


def _readable(group: Group) -> list[Entry]:
    """Files of a kind that can be read, sorted by path."""
    readable = (entry for entry in group.entries if not entry.is_folder and _suffix(entry.path) in _READERS)
    return sorted(readable, key=lambda entry: entry.path)


def _left_out(group: Group) -> list[str]:
    """A note per kind of file that is not read."""
    others = [entry for entry in group.entries if not entry.is_folder and _suffix(entry.path) not in _READERS]
    kinds = Counter(entry.problem or f"{_kind_of(entry.path)} can't be read" for entry in others)
    return [f"{count} {'file' if count == 1 else 'files'} left out: {why}" for why, count in sorted(kinds.items())]


def _main_language(documents: Iterable[tuple[str, Document]]) -> str:
    """The language with most code."""
    sizes: Counter[str] = Counter()
    for _, document in documents:
        sizes[document.language] += sum(len(part.text) for part in document.parts if part.kind == "code")
    known = {language: size for language, size in sizes.items() if language}
    return max(sorted(known), key=known.__getitem__, default="")


# --- kinds of file


def _notebook(text: str, _suffix: str) -> Document:
    if not text.strip():
        raise Unreadable("the file is empty")
    return read_notebook(text)


def _script(text: str, suffix: str) -> Document:
    code, images = clean_source(text)
    parts = (Part("code", code.strip("\n"), "script"),) if code.strip() else ()
    return Document(parts, {".r": "R", ".py": "Python", ".sql": "SQL"}[suffix], images)


def _prose(text: str, suffix: str) -> Document:
    prose, images = clean_source(text)
    prose = without_header(prose) if suffix == ".md" else prose
    return Document((Part("text", prose.strip("\n"), "text"),) if prose.strip() else (), "", images)


def _page(text: str, _suffix: str) -> Document:
    """What was typed into the LMS's own editor."""
    prose, images = html_to_text(text)
    prose, more = clean_source(prose)
    return Document((Part("text", prose.strip("\n"), "text"),) if prose.strip() else (), "", images + more)


def _markdown_with_chunks(text: str, suffix: str) -> Document:
    """R Markdown and Quarto: executable chunks are code, everything between them is prose, the header is left out."""
    text, images = clean_source(text)
    reader = _ChunkReader("R" if suffix == ".rmd" else "")
    for line in without_header(text).split("\n"):
        reader.read_line(line)
    return reader.document(images)


@dataclass(slots=True)
class _ChunkReader:
    """Splits lines into chunks and prose."""

    default: str
    parts: list[Part] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    language: str | None = None  # of the chunk that is open; None: in prose

    def read_line(self, line: str) -> None:
        if self.language is None and (start := _CHUNK_START.match(line)):
            self._finish("text")
            self.language = language_name(start[1])
        elif self.language is not None and _CHUNK_END.match(line):
            self._finish("code")
        else:
            self.lines.append(line)

    def document(self, images: int) -> Document:
        notes = ("the last code chunk is never closed",) if self.language is not None else ()
        self._finish("code" if self.language is not None else "text")
        language = max(sorted(self.languages), key=self.languages.__getitem__, default=self.default)
        return Document(tuple(self.parts), language, images, notes)

    def _finish(self, kind: PartKind) -> None:
        text = "\n".join(self.lines).strip("\n")
        self.numbers[kind] += kind == "code" or bool(text.strip())
        if text.strip():
            name = "chunk" if kind == "code" else "text"
            self.parts.append(Part(kind, text, f"{name} {self.numbers[kind]}"))
            if self.language:
                self.languages[self.language] += len(text)
        self.lines, self.language = [], None


_READERS: dict[str, Callable[[str, str], Document]] = {
    ".ipynb": _notebook,
    ".r": _script,
    ".rmd": _markdown_with_chunks,
    ".qmd": _markdown_with_chunks,
    ".py": _script,
    ".sql": _script,
    ".md": _prose,
    ".txt": _prose,
    ".html": _page,
}
